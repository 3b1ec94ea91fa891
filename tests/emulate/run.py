#!/usr/bin/env python3
"""Runs the scripts of this folder, and the recorded cases, on the emulated GPU and checks what the ledgers say.

    run.py --vramledger target/release/vramledger [--only NAME[,NAME…]] [--results FILE.jsonl]

The Python that runs this runs the scripts. The scripts are as their users would write them; what is true of each
ledger stands in `SCRIPTS`, and in `KEPT` what is to be said of those that keep something, or nothing, from step to
step (named `kept-` and the script's name). The recorded cases of tests/truth are run by scripts/truth_case.py under
the library beside the binary; `--results` keeps what came out, for `cargo xtask truth --emulated`. Leaves with 1 if
anything is not so.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import reconciled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CASES = ("tests/truth/events/cases.jsonl", "tests/truth/cases.jsonl")
# Two of anything: the tests are meant for small machines.
JOBS = 2
# The share of a peak that may be without an owner.
UNATTRIBUTED_AT_MOST = 0.005
LIMIT_SECONDS = 600


@dataclass
class Script:
    """A script, how it is run, and what its ledger must say."""

    file: str
    # Bytes of its parameters on the device, by the shapes in the script.
    parameters: int
    # Bytes of the parameters that learn, where others are frozen.
    trainable: int | None = None
    # Optimizer state in units of the trainable parameters.
    state: float = 2.0
    micro_batches: int = 1
    steps: int = 3
    gpu: str = "H100-80GB"
    arguments: list[str] = field(default_factory=list)
    # What more must hold: functions of the ledger that yield sentences.
    also: tuple = ()
    # The exit code; 1 says that the device is too small.
    code: int = 0


def grows(ledger):
    """Every step ends with more than the one before."""
    ends = [row["end"]["requested_bytes"] for row in ledger["phases"] if row["phase"] == "update"]
    # The first step makes the optimizer's state.
    if not all(a < b for a, b in zip(ends[1:], ends[2:])) or len(ends) < 4:
        yield f"it keeps its graphs, but the ends of its steps are {ends}"


def steady(ledger):
    """From the second step on, every step ends as the one before."""
    ends = [row["end"]["requested_bytes"] for row in ledger["phases"] if row["phase"] == "update"]
    if len(set(ends[1:])) > 1:
        yield f"it keeps nothing, but the ends of its steps are {ends}"


def offloads(ledger):
    """Eight saved activations of 32 MiB and eight more of the activation function are not on the device."""
    for row in rows(ledger, "forward"):
        if row["end_by_category"]["activation"] > 4 << 20:
            yield f"step {row['step']}: {row['end_by_category']['activation']} bytes of activations stay on the device"


def runs_out(ledger):
    """The phase and the object that found no room are told."""
    oom = ledger["oom"] or {}
    if ledger["fits"] is not False or not ledger["oom"]:
        yield f"the device is too small, but `fits` is {ledger['fits']} and `oom` {ledger['oom']}"
    elif (oom["step"], oom["phase"]) != (1, "update") or not oom["object"] or not oom["requested_bytes"]:
        yield f"the state of Adam finds no room in the update of step 1, but `oom` is {oom}"


MLP = 4 * (784 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10)
GPT2 = 4 * (5000 * 256 + 256 * 256 + 4 * (12 * 256 * 256 + 13 * 256) + 2 * 256)
NANOGPT = 4 * (4096 * 384 + 256 * 384 + 6 * (12 * 384 * 384 + 4 * 384 + 4 * 384 + 384) + 2 * 384)
ENCODER = 4 * (2000 * 256 + 2 * (12 * 256 * 256 + 13 * 256) + 256 * 16 + 16)
LLAMA_LAYER = 1024 * 1024 * 2 + 2 * 1024 * 256 + 3 * 1024 * 2816 + 2 * 1024
LLAMA = 4 * (2 * 8000 * 1024 + 4 * LLAMA_LAYER + 1024)
WIDE = 4 * (6 * (1024 * 1024 + 1024) + 1024 * 100 + 100)
ADAPTERS = 4 * 581_632
QWEN2_LAYER = 2 * 512 * 512 + 512 + 2 * (512 * 128 + 128) + 3 * 512 * 1408 + 2 * 512
QWEN2 = 2 * (2 * 8000 * 512 + 4 * QWEN2_LAYER + 512)
SQUARE = 4 * 8 * (2048 * 2048 + 2048)
GRU = 4 * (3 * 256 * (32 + 256 + 2) + 3 * 256 * (256 + 256 + 2) + 256 * 8 + 8)
EMBEDDING = 4 * (1000 * 512 + 512 * 64 * 1024 + 1024 + 1024 + 1)


def convolutions():
    """Bytes of the parameters of convnet.py."""
    count = 3 * 32 * 49 + 2 * 32
    for inside, outside, shortcut in ((32, 32, 0), (32, 64, 1), (64, 128, 1), (128, 256, 1)):
        count += 9 * inside * outside + 9 * outside * outside + 4 * outside
        count += shortcut * (inside * outside + 2 * outside)
    return 4 * (count + 256 * 100 + 100)


SCRIPTS = [
    Script("mlp.py", MLP, also=(steady,)),
    Script("mlp.py", MLP, arguments=["--capacity", "670MiB"], code=1, also=(runs_out,)),
    Script("trainer_gpt2.py", GPT2, micro_batches=2, also=(steady,)),
    # More tokens than 3072, whose embedding's gradient is sorted by CUB, on a card whose own code nobody compiles.
    Script("nanogpt.py", NANOGPT, micro_batches=4, gpu="RTX-4090", also=(steady,)),
    Script("compiled.py", ENCODER, also=(steady,)),
    Script("fsdp2.py", LLAMA // 8, arguments=["--gpus", "8", "--rank", "3"], also=(steady,)),
    Script("ddp.py", WIDE, state=1.0, arguments=["--gpus", "4", "--rank", "1"], also=(steady,)),
    Script("lora.py", QWEN2 + ADAPTERS, trainable=ADAPTERS, also=(steady,)),
    Script("convnet.py", convolutions(), state=1.0, also=(steady,)),
    Script("offload.py", SQUARE, also=(steady, offloads)),
    Script("evaluate.py", GRU, state=1.0, also=(steady,)),
    Script("keeps_losses.py", EMBEDDING, state=1.0, steps=6, arguments=["--steps", "all"], also=(grows,)),
]


@dataclass
class Kept:
    """A script that keeps something from step to step, or nothing, and what is said of it."""

    file: str
    verdict: str
    # Who makes what grows most, or what grew and is at rest; bytes a step of that; whether it is a graph.
    owner: str = ""
    bytes_per_step: int = 0
    graph: bool = False


BATCH = 64 * 384 * 4
KEPT = [
    # The embedding and the activation function of a step; the prediction, the loss and the tokens besides.
    Kept("keeps_losses.py", "growing", "embedding", 256 * 64 * 512 * 4, graph=True),
    Kept("growth/kept_features.py", "growing", "activation.py", BATCH),
    # Four batches of 8 x 32 tokens with 2000 logits each, every second step.
    Kept("growth/kept_logits.py", "growing", "linear.py", 4 * 8 * 32 * 2000 * 4 // 2),
    Kept("growth/varying_lengths.py", "longest_input"),
    Kept("growth/filled_cache.py", "warm_up", "linear.py", 128 * 1024 * 4),
    Kept("growth/strands.py", "stranding", "strands.py", 2 << 20),
    Kept("growth/clean_item.py", "steady"),
    Kept("growth/clean_detach.py", "steady"),
    Kept("growth/clean_evaluation.py", "steady"),
    Kept("growth/clean_ema.py", "steady"),
    Kept("growth/clean_warm_up.py", "longest_input"),
    Kept("growth/clean_accumulation.py", "steady"),
    Kept("growth/clean_lengths.py", "longest_input"),
    Kept("growth/clean_scaler.py", "steady"),
]


def check_growth(kept, where, growth):
    """Yields a sentence for everything that is wrongly said of what a script keeps."""
    if growth["verdict"] != kept.verdict:
        yield f"{where}: the verdict is {growth['verdict']}, not {kept.verdict}"
    rows = growth["settled"] if kept.verdict == "warm_up" else growth["rows"]
    if not kept.owner:
        if growth["rows"]:
            yield f"{where}: {growth['rows'][0]['name']} is accused"
    elif not rows or kept.owner not in rows[0]["name"] or rows[0]["bytes_per_step"] != kept.bytes_per_step:
        yield f"{where}: not {kept.owner} grows by {kept.bytes_per_step} a step, but {rows[:1]}"
    if growth["kept_graph"] != kept.graph:
        yield f"{where}: that a graph is kept is {growth['kept_graph']}"
    if "leak" in growth["explanation"]:
        yield f"{where}: it is said that {growth['explanation']}"


def keep(kept, options):
    """Runs a script; answers with the seconds it took and what does not hold of its ledger, tape and snapshot."""
    begin = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def answer(*arguments):
        command = [options.vramledger, *arguments]
        limit = {"timeout": LIMIT_SECONDS, "capture_output": True, "text": True}
        return subprocess.run(command, cwd=folder, env=environment, **limit)

    with tempfile.TemporaryDirectory() as folder:
        run = ["emulate", "--steps", "all", "--snapshot", "run.pickle", "-o", "run.vlt", "--format", "json"]
        ended = answer(*run, "--", sys.executable, str(HERE / kept.file))
        # What the program prints itself stands before the ledger.
        ledger = ended.stdout[ended.stdout.find('{\n  "format"') :]
        if ended.returncode != 0 or not ledger:
            return time.monotonic() - begin, [f"the exit code is {ended.returncode}:\n{ended.stderr}"]
        growths = {"its ledger": json.loads(ledger)["growth"]}
        growths["its tape"] = json.loads(answer("read", "run.vlt", "--format", "json").stdout)["growth"]
        snapshot = json.loads(answer("read", "run.pickle", "--format", "json").stdout)
        growths["its snapshot"] = snapshot["reading"]["growth"]
    complaints = [said for where, growth in growths.items() for said in check_growth(kept, where, growth)]
    return time.monotonic() - begin, complaints


def run_kept(options, wanted):
    failed = []
    scripts = [kept for kept in KEPT if not wanted or f"kept-{Path(kept.file).stem}" in wanted]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for kept, future in [(kept, pool.submit(keep, kept, options)) for kept in scripts]:
            seconds, complaints = future.result()
            stem = Path(kept.file).stem
            print(f"{stem:18} {'no' if complaints else 'ok'}  {seconds:5.1f} s  {kept.verdict}", flush=True)
            for complaint in complaints:
                print(f"    {complaint}", flush=True)
            if complaints:
                failed.append(stem)
    return failed


def name(script):
    return Path(script.file).stem + ("-too-small" if script.code else "")


def rows(ledger, phase):
    return [row for row in ledger["phases"] if row["phase"] == phase]


def check(script, ledger):
    """Yields a sentence for everything that does not hold of a ledger."""
    if ledger["format"] != "vramledger/1" or ledger["provenance"] != "emulated":
        yield f"it is a {ledger['format']}, {ledger['provenance']}"
    for row in ledger["phases"]:
        where = f"step {row['step']} {row['phase']}"
        total, categories = row["end"]["requested_bytes"], sum(row["end_by_category"].values())
        if total != categories:
            yield f"{where} ends with {total} bytes, its categories sum to {categories}"
        for when in ("peak", "end"):
            yield from ladder(f"{where} {when}", row[when])
    peaks = {measure: ledger["peaks"][measure]["bytes"] for measure in ("requested", "allocated", "reserved")}
    yield from ladder("the run", {f"{measure}_bytes": value for measure, value in peaks.items()})
    for measure in ("requested", "allocated"):
        peak = ledger["peaks"][measure]
        if sum(row["bytes"] for row in peak["contributors"]) != sum(peak["by_category"].values()):
            yield f"the contributors of the {measure} peak do not sum to its categories"
        unknown = peak["by_category"].get("unattributed", 0)
        if unknown > UNATTRIBUTED_AT_MOST * peak["bytes"]:
            yield f"{unknown} of {peak['bytes']} {measure} bytes are unattributed"
    for check_more in script.also:
        yield from check_more(ledger)
    if script.code == 0:
        yield from check_run(script, ledger)


def check_run(script, ledger):
    """Yields a sentence for everything that does not hold of a run to its end."""
    if ledger["fits"] is not True or ledger["oom"]:
        yield f"`fits` is {ledger['fits']} and `oom` {ledger['oom']}"
    expected = [(0, None, "load")]
    for step in range(1, script.steps + 1):
        for micro_batch in range(1, script.micro_batches + 1):
            expected += [(step, micro_batch, "forward"), (step, micro_batch, "backward")]
        expected.append((step, None, "update"))
    found = [(row["step"], row["micro_batch"], row["phase"]) for row in ledger["phases"]]
    if found != expected:
        yield f"its phases are {found}"
        return
    # A trainer may keep a scalar or two.
    if ledger["phases"][0]["end_by_category"]["input"] > 64:
        yield "the first batch is counted in load"
    if ledger["batch"]["accumulate"] != script.micro_batches:
        yield f"the batch is {ledger['batch']}"
    if (ledger["parameters"] or {}).get("bytes") != script.parameters:
        yield f"the parameters are {ledger['parameters']}, not {script.parameters} bytes"
    trainable = script.trainable or script.parameters
    for row in ledger["phases"][1:]:
        where, held = f"step {row['step']} {row['phase']}", row["end_by_category"]
        if held["parameter"] != script.parameters:
            yield f"{where} ends with {held['parameter']} bytes of parameters, not {script.parameters}"
        if row["phase"] == "backward" and held["gradient"] != trainable:
            yield f"{where} ends with {held['gradient']} bytes of gradients, not {trainable}"
        # Counters of steps may lie on the device, four bytes for each parameter.
        state = held["optimizer_state"]
        if row["phase"] == "update" and not 0 <= state - script.state * trainable <= 0.001 * trainable:
            yield f"{where} ends with {state} bytes of optimizer state, not {script.state} x {trainable}"


def ladder(where, measures):
    values = [measures[f"{measure}_bytes"] for measure in ("requested", "allocated", "reserved")]
    if values != sorted(values) or not all(values[1:]):
        yield f"{where}: requested, allocated and reserved are {values}"


def emulate(script, options):
    """Runs a script; answers with the seconds it took, its peaks and what does not hold."""
    begin = time.monotonic()
    command = [options.vramledger, "emulate", "--gpu", script.gpu, "--format", "json", *script.arguments]
    command += ["--", sys.executable, str(HERE / script.file)]
    # Nothing is looked for on a network.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        answer = os.path.join(folder, "ledger.json")
        command[2:2] = ["-o", answer]
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return LIMIT_SECONDS, {}, [f"it did not end in {LIMIT_SECONDS} seconds"]
        seconds = time.monotonic() - begin
        if ended.returncode != script.code or not os.path.exists(answer):
            tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-12:])
            return seconds, {}, [f"the exit code is {ended.returncode}, not {script.code}:\n{tail}"]
        with open(answer) as file:
            ledger = json.load(file)
    peaks = {measure: ledger["peaks"][measure]["bytes"] for measure in ("requested", "allocated", "reserved")}
    return seconds, {**peaks, "warnings": ledger["warnings"]}, list(check(script, ledger))


def cannot_run(script):
    """Why this machine cannot run a script, if so."""
    if script.file == "compiled.py" and not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "Triton compiles a module for this Python, whose headers (python3-dev) are not there"
    return None


def run_scripts(options, wanted):
    failed = []
    scripts = [script for script in SCRIPTS if not wanted or name(script) in wanted]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        started = [(s, None if cannot_run(s) else pool.submit(emulate, s, options)) for s in scripts]
        for script, future in started:
            if future is None:
                print(f"{name(script):18} skipped: {cannot_run(script)}", flush=True)
                continue
            seconds, peaks, complaints = future.result()
            figures = " ".join(f"{measure} {peaks[measure]}" for measure in list(peaks)[:3])
            print(f"{name(script):18} {'no' if complaints else 'ok'}  {seconds:5.1f} s  {figures}", flush=True)
            for sentence in peaks.get("warnings", []):
                print(f"    warning: {sentence}", flush=True)
            for complaint in complaints:
                print(f"    {complaint}", flush=True)
            if complaints:
                failed.append(name(script))
    return failed


def run_reconciled(options):
    """Holds plans against emulated runs."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        complaints = list(reconciled.check(options.vramledger, folder))
    print(f"{'reconciled':18} {'no' if complaints else 'ok'}  {time.monotonic() - begin:5.1f} s", flush=True)
    for complaint in complaints:
        print(f"    {complaint}", flush=True)
    return ["reconciled"] if complaints else []


def run_truth(options):
    """Runs the recorded cases as they were recorded: the library alone, no recorder."""
    library = Path(options.vramledger).resolve().parent / "libvramledger_emulator.so"
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for link in ("libcuda.so.1", "libnvidia-ml.so.1"):
            os.symlink(library, os.path.join(folder, link))
        environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder, "HF_HUB_OFFLINE": "1"}
        environment["OMP_NUM_THREADS"] = "1"
        for number, cases in enumerate(CASES):
            begin, output = time.monotonic(), os.path.join(folder, f"{number}.jsonl")
            command = [sys.executable, ROOT / "scripts/truth_case.py", ROOT / cases, "--check"]
            command += ["--jobs", str(JOBS), "-o", output]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            lines = ended.stdout.splitlines()
            equal = sum(line.endswith(" equal") for line in lines)
            print(f"{cases}: {equal} of {len(lines)} cases equal, {time.monotonic() - begin:.1f} s", flush=True)
            short = [line for line in lines if not line.endswith(" equal")]
            for line in short:
                print(f"    {line}", flush=True)
            if ended.returncode != 0 or not lines:
                failed.append(cases)
                if not short:
                    print("\n".join(ended.stderr.splitlines()[-12:]), flush=True)
            if options.results and os.path.exists(output):
                with open(output) as part, open(options.results, "a" if number else "w") as results:
                    results.write(part.read())
    return failed


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vramledger", required=True)
    options.add_argument("--only", help="names of scripts; `truth` stands for the recorded cases, `reconciled` for plans beside runs")
    options.add_argument("--results")
    options = options.parse_args()
    options.vramledger = os.path.abspath(options.vramledger)
    wanted = set(options.only.split(",")) if options.only else set()
    unknown = wanted - {name(script) for script in SCRIPTS} - {f"kept-{Path(kept.file).stem}" for kept in KEPT}
    unknown -= {"truth", "reconciled"}
    if unknown:
        sys.exit(f"there is no script `{min(unknown)}`")
    scripts = not wanted or bool(wanted - {"truth", "reconciled"})
    failed = run_scripts(options, wanted) + run_kept(options, wanted) if scripts else []
    if not wanted or "reconciled" in wanted:
        failed += run_reconciled(options)
    if not wanted or "truth" in wanted:
        failed += run_truth(options)
    if failed:
        sys.exit(f"not as it should be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
