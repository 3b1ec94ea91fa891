# Tells in one line of JSON what emulation needs to know of this Python. PyTorch is found, not imported.
import importlib.util
import json
import os
import platform
import runpy
import sys

# Where the line below stands in a script, the script's folder stands here; ours has no say in what `torch` is.
sys.path = [place for place in sys.path if place]
found = importlib.util.find_spec("torch")
version = {}
if found is not None and found.origin:
    version = runpy.run_path(os.path.join(os.path.dirname(found.origin), "version.py"))
torch = version.get("__version__")
told = {
    "python": platform.python_version(),
    "system": sys.platform,
    "machine": platform.machine(),
    "torch": torch if torch is None else str(torch),
    "cuda": version.get("cuda"),
}
print(json.dumps(told))
