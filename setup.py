"""The packages, and the folders that they are installed from; all other settings are in pyproject.toml."""

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
