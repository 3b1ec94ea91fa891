#!/usr/bin/env python3
"""Measures open cases on the GPU that is there, and sets them beside what is planned, emulated and recorded.

Called by scripts/gpu_check.sh with the path of the `vramledger` binary. Bytes everywhere; a difference is the figure
less the measured one. The emulation is of this GPU, with the library beside the binary and the same PyTorch.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Small ones first, so that what time does not allow is the largest. A card of 24 GB takes all but the last three.
IDS = (
    "o-mlp-4x1024",
    "o-mlp-8x4096-fused",
    "o-gpt2tiny-fp32",
    "o-gpt2-fp32",
    "o-gpt2-acbf16",
    "o-gpt2-eager-fp32",
    "o-gpt2-ckpt-fp32",
    "o-gpt2-expseg",
    "o-gpt2m-bf16-fused",
    "o-nanogpt-char",
    "o-llama-2l-bf16",
    "o-llama-8l-fp32-math",
    "o-llama-16l-accum8-clip",
    "o-llama-16l-varlen",
    "o-qwen3-0.6b-bf16",
    "o-lora8-llama1b",
    "o-llama1b-bf16",
    "o-llama8b-sgd-ckpt",
    "o-llama1b-acbf16-ckpt",
    "o-llama8b-bf16-ckpt",
)
MEASURES = ("requested", "allocated", "reserved")
# Of the four minutes: no case is begun later than this, on the GPU and then on the emulated one.
MEASURED_SECONDS, EMULATED_SECONDS = 110, 70
# The releases that the planner models.
MODELLED = ((2, 6), (2, 11), (2, 15))


def main(vramledger):
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            leave(f"`{sys.executable}` has no {module}: install it with `{sys.executable} -m pip install {module}`")
    # This process only asks what is there: the cases run in others.
    sys.path.append(str(ROOT / "crates/emulator/bootstrap"))
    import torch
    import vramledger_host

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 9):
        leave(f"torch {torch.__version__} is too old: 2.9 or newer is needed")
    if not torch.cuda.is_available():
        leave("PyTorch finds no CUDA device")
    properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    rehearsal = vramledger_host.emulated()
    tell_software(torch, properties, rehearsal)
    cases = wanted_cases(free, total)
    with tempfile.TemporaryDirectory() as folder:
        measured = run_cases(cases, folder, dict(os.environ), MEASURED_SECONDS)
        if not measured:
            leave("no case ran to its end on the device")
        emulated = emulate(cases, folder, vramledger, properties)
        planner = Planner(vramledger, folder, properties, release)
        print(f"planned for {planner.gpu}, torch {planner.torch}\n")
        tell(cases, measured, emulated, planner, "rehearsed" if rehearsal else "measured")
    sys.stdout.flush()
    os._exit(0)


def leave(sentence):
    print(f"gpu_check: {sentence}", file=sys.stderr)
    sys.exit(2)


def tell_software(torch, properties, rehearsal):
    driver = None
    if shutil.which("nvidia-smi") and not rehearsal:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    found = {
        "GPU": f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory} bytes",
        "driver": driver or "unknown: no nvidia-smi",
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "peft": importlib.metadata.version("peft") if importlib.util.find_spec("peft") else "not there",
        "Python": sys.version.split()[0],
    }
    for name, value in found.items():
        print(f"{name:14} {value}")
    if rehearsal:
        print("This is the emulated GPU: a rehearsal, nothing is measured.")


def wanted_cases(free, total):
    """The cases that fit, with the card's own size; the others get a sentence."""
    with open(ROOT / "tests/truth/cases.jsonl") as lines:
        known = {case["id"]: case for case in map(json.loads, lines)}
    cases = []
    for name in IDS:
        case = known[name]
        need = case["truth"]["peak_reserved_bytes"]
        if need > free:
            print(f"{name} is left out: it needs {need} bytes and {free} are free")
        elif case["setup"]["lora"] and importlib.util.find_spec("peft") is None:
            print(f"{name} is left out: it needs peft")
        else:
            case["setup"]["capacity_bytes"] = total
            cases.append(case)
    return cases


def run_cases(cases, folder, environment, seconds):
    """The figures of the cases that ran, by name, of the device that this environment has."""
    inputs, output = os.path.join(folder, "cases.jsonl"), os.path.join(folder, "found.jsonl")
    with open(inputs, "w") as file:
        file.writelines(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, str(ROOT / "scripts/truth_case.py"), inputs, "-o", output, "--seconds", str(seconds)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(ended.stdout, end="")
    if ended.returncode != 0:
        print("\n".join(ended.stderr.splitlines()[-8:]), file=sys.stderr)
    if not os.path.exists(output):
        return {}
    with open(output) as lines:
        found = [json.loads(line) for line in lines]
    os.remove(output)
    return {case["id"]: case["truth"] for case in found}


def emulate(cases, folder, vramledger, properties):
    """The same cases on an emulated GPU of this kind."""
    library = Path(vramledger).resolve().parent / "libvramledger_emulator.so"
    if not library.exists():
        print(f"not emulated: no `{library}`, which `cargo build --release --package emulator` makes")
        return {}
    for link in ("libcuda.so.1", "libnvidia-ml.so.1"):
        os.symlink(library, os.path.join(folder, link))
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": folder,
        "VRAMLEDGER_GPU_NAME": properties.name,
        "VRAMLEDGER_GPU_CAPABILITY": f"{properties.major}.{properties.minor}",
        "VRAMLEDGER_GPU_SMS": str(properties.multi_processor_count),
    }
    return run_cases(cases, folder, environment, EMULATED_SECONDS)


class Planner:
    """`vramledger plan` for this card."""

    def __init__(self, vramledger, folder, properties, release):
        self.vramledger, self.folder = vramledger, folder
        answer = subprocess.run([vramledger, "gpus", "--format", "json"], capture_output=True, text=True, check=True)
        here, size = (properties.major, properties.minor), properties.total_memory

        def distance(gpu):
            major, minor = map(int, gpu["compute_capability"].split("."))
            same = (major, minor) == here
            return (not same, abs(major - here[0]), abs(minor - here[1]), abs(gpu["capacity_bytes"] - size))

        self.gpu = min(json.loads(answer.stdout)["gpus"], key=distance)["name"]
        older = [known for known in MODELLED if known <= release]
        self.torch = ".".join(map(str, older[-1] if older else MODELLED[0]))

    def peaks(self, case):
        """The planned peaks by measure, or a sentence that says why there are none."""
        if case["setup"]["lora"]:
            return "`plan` knows no adapters"
        command = [self.vramledger, "plan", self.model(case["model"]), *self.flags(case)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode not in (0, 1):
            return " ".join(ended.stderr.split())
        peaks = json.loads(ended.stdout)["peaks"]
        return {measure: peaks[measure]["bytes"] for measure in MEASURES}

    def model(self, model):
        if model["class"] == "mlp":
            return f"mlp:{model['config']['layers']}x{model['config']['width']}"
        path = os.path.join(self.folder, "config.json")
        with open(path, "w") as file:
            json.dump(model["config"], file)
        return path

    def flags(self, case):
        setup = case["setup"]
        loss = case["model"]["config"].get("loss")
        values = {
            "gpu": self.gpu,
            "torch": self.torch,
            "capacity": setup["capacity_bytes"],
            "alloc-conf": setup["alloc_conf"] or None,
            "batch": setup["batch"],
            "seq": None if setup.get("seqs") else setup.get("seq"),
            "seqs": ",".join(map(str, setup.get("seqs") or [])) or None,
            "steps": setup["steps"],
            "accumulate": setup["accumulate"],
            "dtype": setup["dtype"],
            "autocast": setup["autocast"],
            "attention": setup["attention"],
            "sdpa-kernel": setup["sdpa_kernel"],
            "checkpoint": setup["checkpoint"],
            "optimizer": setup["optimizer"],
            "optimizer-impl": setup["optimizer_impl"],
            "momentum": setup["momentum"],
            "clip-grad-norm": setup["clip_grad_norm"],
            "zero-grad": setup["zero_grad"],
            "loss": loss and ("sum" if "sum" in loss else "mean-square"),
        }
        if case["model"]["class"] == "mlp":
            for name in ("seq", "seqs", "attention", "sdpa-kernel"):
                values[name] = None
        flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
        if setup.get("keep_outputs"):
            flags.append("--keep-outputs")
        return [*flags, "--format=json", "--quiet"]


def tell(cases, measured, emulated, planner, title):
    """The table, a line for each measure of each case, and what it comes to."""
    print(f"{'case':26} {'peak':10} {title:>14} {'emulated':>25} {'planned':>25} {'recorded (H100, 2.15)':>25}")
    equal, of, sentences = {}, {}, []
    for case in cases:
        found = measured.get(case["id"])
        if found is None:
            continue
        if found["oom"]:
            sentences.append(f"{case['id']} ran out of memory: {found['oom']['message'].splitlines()[0]}")
        planned = planner.peaks(case)
        if isinstance(planned, str):
            sentences.append(f"{case['id']} is not planned: {planned}")
            planned = {}
        for measure in MEASURES:
            truth = found[f"peak_{measure}_bytes"]
            columns = {
                "emulated": emulated.get(case["id"], {}).get(f"peak_{measure}_bytes"),
                "planned": planned.get(measure),
                "recorded": case["truth"][f"peak_{measure}_bytes"],
            }
            cells = [f"{case['id']:26} {measure:10} {truth:14}"]
            for name, value in columns.items():
                cells.append(f"{'-' if value is None else beside(value, truth):>25}")
                if value is not None:
                    of[name] = of.get(name, 0) + 1
                    equal[name] = equal.get(name, 0) + (value == truth)
            print(" ".join(cells))
    print()
    for name in of:
        print(f"{name}: {equal[name]} of {of[name]} figures equal to the byte")
    for sentence in sentences:
        print(sentence)


def beside(value, truth):
    """A figure and how far it is from the measured one."""
    if value == truth:
        return "="
    share = f" ({100 * (value - truth) / truth:+.2f} %)" if truth else ""
    return f"{value - truth:+}{share}"


if __name__ == "__main__":
    main(sys.argv[1])
