"""benchmarks/relayout.py: without torch it says what is lacking, by the exit code for that."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "relayout.py"
WITHOUT_TORCH = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"


def test_without_torch_it_says_so_and_exits_with_3():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3
    assert "pip install torch" in ran.stderr
