"""The wheel: all of the package, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_package_its_types_and_its_licence(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "gcjax").rglob("*.py")}
    about = {name for name in held if ".dist-info/" in name}
    assert held - about == package | {"gcjax/py.typed"}
    assert any(name.endswith("/licenses/LICENSE") for name in about)
