"""The npm package `headway-client`: its runtime, and types of the AsyncAPI document."""

import json
import shutil
import tempfile
from pathlib import Path

from ops.clients.packing import ROOT, run_builder, version

NAME = "headway-client"
HERE = Path(__file__).parent / "javascript"


def build_npm(out: Path) -> Path:
    """
    Pack the package into the folder *out*; return the path of the tarball.

    Raises:
        SettingsError: npm is not installed or fails; the message has its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / NAME
        shutil.copytree(HERE, tree, ignore=shutil.ignore_patterns("node_modules"))
        shutil.copy(ROOT / "LICENSE", tree)
        manifest = tree / "package.json"
        described = json.loads(manifest.read_text()) | {"version": version()}
        manifest.write_text(json.dumps(described, indent=2) + "\n")
        run_builder(["npm", "pack", "--pack-destination", str(out.resolve())], tree)
    return out / f"{NAME}-{version()}.tgz"
