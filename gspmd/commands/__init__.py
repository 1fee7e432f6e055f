"""The commands of `gspmd`, listed in `main.COMMANDS`; scripts/ runs the same ones from a checkout.

Reading order: main, flags, runner, configs, then a file for each command; for train: settings, programs, train.
"""
