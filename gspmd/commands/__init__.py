"""The commands of `gspmd`, listed in `main.COMMANDS`; scripts/ runs the same ones from a checkout.

Reading order: main, runner, flags, described, configs, then a file for the settings of each command, which imports no
JAX, and one for what it does; for train: settings, programs, train.
"""
