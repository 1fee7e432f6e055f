"""Which folders are packages, and what they are called where they are installed; all else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["gspmd", "gspmd.*"]),
        "gspmd.configs",
        "gspmd_models",
        *(f"gspmd_models.{package}" for package in find_packages("models")),
    ],
    package_dir={"gspmd.configs": "configs", "gspmd_models": "models"},
)
