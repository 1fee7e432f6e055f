"""The commands of `gspmd`, listed in `main.COMMANDS`; files in scripts/ run the same commands from a checkout.

Reading order: main, runner, flags, described, configs; then, for each command, the file of its settings, which imports
no JAX, and the file that runs it (for train: settings, programs, train).
"""
