"""Started by Python itself before a script runs: waits for PyTorch to be imported, then lets the recorder in.

The folder of this file is put first on PYTHONPATH. Nothing happens without VRAMLEDGER_RECORD, the folder for what is
recorded. A `sitecustomize` of the user's own, further down the path, runs as it would have run.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds `torch` as the other finders do and starts the recorder once its module has run."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                import vramledger_recorder

                at_end.append(vramledger_recorder.start(module))

            spec.loader.exec_module = exec_module
        return spec


def run_users_own():
    """Runs the `sitecustomize` that this one stands before, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


at_end = []


def leave():
    for call in at_end:
        call()


if os.environ.get("VRAMLEDGER_RECORD"):
    # Registered before anybody else's, so that it runs after them.
    atexit.register(leave)
    sys.meta_path.insert(0, AfterTorch())
run_users_own()
