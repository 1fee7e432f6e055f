"""`gspmd explain` from a checkout: `python scripts/explain.py --help` lists its flags."""

import sys

try:
    from gspmd.__main__ import script
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install gspmd first: pip install -e . in the folder of the checkout.")

if __name__ == "__main__":
    sys.exit(script("explain", "explain.py"))
