"""The commands of `gspmd`, listed in `main.COMMANDS`; scripts/ runs the same ones from a checkout.

Reading order: main, runner, flags, described, configs; then, for each command, the file of its settings, which imports
no JAX, and the file that runs it (for train: settings, programs, train).
"""
