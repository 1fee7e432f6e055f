"""The console commands: `gspmd train`, `gspmd explain`, `gspmd compile`; scripts/ runs the same ones from a checkout.

Reading order: main, configs, then a file for each command.
"""
