"""Lets the test modules of this folder import `qwen3_8_cases` and `qwen3_8_slow`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
