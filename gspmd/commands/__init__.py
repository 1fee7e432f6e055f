"""The console commands: `gspmd train`, `gspmd explain`, `gspmd compile`; scripts/ runs the same ones from a checkout.

Reading order: main, flags, runner, configs, then a file for each command; of train: settings, programs, train.
"""
