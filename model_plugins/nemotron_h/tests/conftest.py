"""Lets the test modules of this folder import `nemotron_h_cases`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
