#!/usr/bin/env python3
"""Runs cases of a list of training cases on the device that is there, real or emulated, and records their memory.

    truth_case.py CASES.jsonl ID [--events FILE.csv[.gz]] [--snapshot FILE.pickle] [-o FILE.json] [--check]
    truth_case.py CASES.jsonl [--jobs N] [--seconds N] [--events FOLDER] [-o FILE.jsonl] [--check]

A case is one line of JSON with `model` and `setup` (see `expressible` for what is understood). The answer is the case
with a `truth` of its own, in bytes: the peaks of requested, allocated and reserved memory, and of each phase its
maximum and its end. `--events` writes every event of the caching allocator with its step, micro-batch and phase; of
a whole list into a folder, NAME.csv.gz for the case s-NAME.
`--check` compares with the `truth` the case brings and leaves with 1 when a number differs. Without an ID every case of
the list runs, each in a process of its own, forked from one that has the libraries; after `--seconds` no other is begun.
"""

import argparse
import contextlib
import csv
import gzip
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import Counter

import truth_adapters
import truth_checkpoint
import truth_deepspeed
import truth_losses
import truth_megatron
import truth_optimizers
import truth_ranks

# What the recorder of `vramledger emulate` uses for the same purpose.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/emulator/bootstrap"))

MEASURES = ("allocated", "requested", "reserved")
STATISTICS = {"allocated": "allocated_bytes", "requested": "requested_bytes", "reserved": "reserved_bytes"}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("cases")
    options.add_argument("id", nargs="?")
    options.add_argument("--events")
    options.add_argument("--snapshot")
    options.add_argument("-o", "--output")
    options.add_argument("--check", action="store_true")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--seconds", type=float, default=float("inf"))
    options = options.parse_args()
    with open(options.cases) as lines:
        cases = [json.loads(line) for line in lines]
    if options.id is None:
        if options.snapshot:
            sys.exit("`--snapshot` is of one case: give its ID")
        if options.events:
            os.makedirs(options.events, exist_ok=True)
        code = run_all(cases, options)
    else:
        case = next((case for case in cases if case["id"] == options.id), None)
        if case is None:
            sys.exit(f"{options.cases} has no case `{options.id}`")
        code = run_one(case, options)
    # A thread of autograd may still want the interpreter: leave without tearing it down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_one(case, options):
    """Runs a case in this process and answers with the exit code."""
    # The device and the allocator read these once, before the first allocation.
    os.environ["VRAMLEDGER_GPU_CAPACITY"] = str(case["setup"]["capacity_bytes"])
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case["setup"]["alloc_conf"]
    run = Run(case, bool(options.events or options.snapshot))
    run.go()
    if options.events:
        write_events(options.events, run.snapshot)
    if options.snapshot:
        with open(options.snapshot, "wb") as file:
            pickle.dump(run.snapshot, file)
    found = {"id": case["id"], "model": case["model"], "setup": case["setup"], "truth": run.truth()}
    text = json.dumps(found)
    if options.output:
        with open(options.output, "w") as file:
            file.write(text + "\n")
    elif not options.check:
        print(text)
    if not options.check:
        return 0
    differences = list(compare(case["truth"], found["truth"], case["setup"]["autocast"]))
    print(case["id"], "differs: " + "; ".join(differences[:6]) if differences else "equal", flush=True)
    return 1 if differences else 0


def run_all(cases, options):
    """Runs every case in a child of its own, `--jobs` at a time; the answers are written in the order of the cases."""
    begin = time.monotonic()
    load_libraries(cases)
    code, running = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        parts = [os.path.join(folder, str(number)) for number in range(len(cases))]
        for case, part in zip(cases, parts):
            if len(running) == options.jobs:
                code |= reap(running)
            if time.monotonic() - begin > options.seconds:
                print(case["id"], f"not begun: {options.seconds:.0f} seconds are over", flush=True)
                code = 1
                continue
            child = os.fork()
            if child == 0:
                events = options.events and os.path.join(options.events, case["id"].removeprefix("s-") + ".csv.gz")
                own = argparse.Namespace(**{**vars(options), "output": part, "events": events})
                leave_with(run_one, case, own)
            running[child] = case["id"]
        while running:
            code |= reap(running)
        texts = []
        for part in parts:
            if os.path.exists(part):
                with open(part) as file:
                    texts.append(file.read())
    if options.output:
        with open(options.output, "w") as file:
            file.writelines(texts)
    elif not options.check:
        sys.stdout.writelines(texts)
    return code


def load_libraries(cases):
    """Imports what the cases need, once for all of them; CUDA is left to the children."""
    import torch  # noqa: F401

    # Where bitsandbytes is, it begins with the device: then the children import it themselves.
    adapted = any(case["setup"]["lora"] for case in cases)
    if adapted and not any(case["setup"].get("quantize") or case["setup"].get("fp32_state") for case in cases):
        import peft  # noqa: F401
    classes = {case["model"]["class"] for case in cases} - {"mlp"}
    if classes:
        import transformers

        for name in classes:
            getattr(transformers, name)


def leave_with(function, *arguments):
    """Ends a child with the code that the function answers."""
    code = 2
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap(running):
    """Waits for a child; one that gave no answer is told of. Answers with 1 if its case is not as recorded."""
    child, status = os.wait()
    case, code = running.pop(child), os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        print(case, f"gave no answer: it ended with {code}", flush=True)
    return int(code != 0)


def compare(expected, found, autocast=None):
    """Yields a sentence for every number of `expected` that `found` does not repeat.

    Autocast frees its casts in no fixed order, so that only the peaks of a run under it are the same each time.
    """
    for key in ("peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes"):
        if expected[key] != found[key]:
            yield f"{key} {found[key]} instead of {expected[key]}"
    if bool(expected["oom"]) != bool(found["oom"]):
        yield f"out of memory: {found['oom'] and found['oom']['message'][:80]}"
    if len(expected["phases"]) != len(found["phases"]):
        yield f"{len(found['phases'])} phases instead of {len(expected['phases'])}"
    if autocast:
        return
    for want, have in zip(expected["phases"], found["phases"]):
        for key in sorted(want):
            if key in have and want[key] != have[key]:
                yield f"step {want['step']} {want['phase']} {key} {have[key]} instead of {want[key]}"


class Run:
    """One case, from an empty device to the end of its last step."""

    def __init__(self, case, record):
        self.setup, self.model_spec, self.record = case["setup"], case["model"], record
        self.zero = truth_deepspeed.is_zero(self.setup["parallel"])
        self.phases, self.oom, self.snapshot = [], None, None
        self.taken, self.trainable = Counter(), None

    def go(self):
        import torch

        self.torch = torch
        torch.cuda.init()
        if self.setup["optimizer"].endswith("bit"):
            truth_optimizers.compile_steps(self.make_model(), self.setup)
        if self.record:
            torch.cuda.memory._record_memory_history(max_entries=10_000_000, stacks="python")
        try:
            with self.attention():
                self.train()
        except torch.OutOfMemoryError as error:
            self.oom = {"step": self.at[0], "micro_batch": self.at[1], "phase": self.at[2], "message": str(error)}
            self.leave()
            self.keep_recording()

    def enter(self, step, micro_batch, phase):
        self.at = (step, micro_batch, phase)
        if self.record:
            self.torch.cuda.memory._set_memory_metadata(f"{step},{'' if micro_batch is None else micro_batch},{phase}")
        self.torch.cuda.reset_peak_memory_stats()

    def leave(self):
        statistics = self.torch.cuda.memory_stats()
        step, micro_batch, phase = self.at
        entry = {"step": step, "micro_batch": micro_batch, "phase": phase}
        for when, kind in (("peak", "peak"), ("end", "current")):
            for measure in MEASURES:
                entry[f"{when}_{measure}_bytes"] = statistics.get(f"{STATISTICS[measure]}.all.{kind}", 0)
        entry["end_requested_by_owner"] = self.owners(entry["end_requested_bytes"])
        self.phases.append(entry)

    def owners(self, total):
        # Without a model, the load has run out of memory.
        if not hasattr(self, "model") or (self.setup["parallel"] or {}).get("kind") == "ddp" or self.zero:
            return None
        seen, sums = set(), {}

        def add(owner, tensors):
            sums.setdefault(owner, 0)
            for tensor in tensors:
                tensor = local(tensor)
                if tensor is None or not tensor.is_cuda or not tensor.untyped_storage().nbytes():
                    continue
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sums[owner] += storage.nbytes()

        add("parameter", self.model.parameters())
        # Megatron's wrapper has a list under this name.
        add("buffer", self.torch.nn.Module.buffers(self.model))
        add("buffer", (t for p in self.model.parameters() for t in truth_adapters.scales(p)))
        add("gradient", (p.grad for p in self.model.parameters() if p.grad is not None))
        add("gradient", truth_ranks.whole_gradients(self.model))
        add("gradient", (p.main_grad for p in self.model.parameters() if hasattr(p, "main_grad")))
        states = (s for optimizer in getattr(self, "optimizers", ()) for s in truth_optimizers.states_of(optimizer))
        add("optimizer_state", (part for s in states for v in s.values() for part in truth_optimizers.parts_of(v)))
        return {**sums, "rest": total - sum(sums.values())}

    def train(self):
        torch, setup = self.torch, self.setup
        self.enter(0, None, "load")
        self.model = model = self.load()
        trainable = [p for p in model.parameters() if p.requires_grad]
        masters = ()
        megatron = (setup["parallel"] or {}).get("kind") == "megatron-do"
        if self.zero:
            self.model = model = truth_deepspeed.wrap(model, setup)
        elif megatron:
            self.optimizers = [truth_megatron.Optimizer(model, setup, self.dtype)]
        elif setup.get("optimizer_in_backward"):
            self.optimizers = truth_optimizers.step_in_backward(trainable, setup, model)
        elif setup.get("master_weights"):
            masters = [p.detach().float().requires_grad_() for p in trainable]
            self.optimizers = truth_optimizers.make(masters, setup, model, dict(zip(trainable, masters)))
        else:
            self.optimizers = truth_optimizers.make(trainable, setup, model)
        self.leave()
        loss_of_ids = None if self.model_spec["class"] == "mlp" else truth_losses.loss_of(setup, model)
        lengths = setup.get("seqs") or [setup["seq"]]
        accumulate = setup["accumulate"]
        keep, leak = setup.get("keep_outputs"), setup.get("leak") == "loss_with_graph"
        kept = []
        for step in range(1, setup["steps"] + 1):
            length = lengths[(step - 1) % len(lengths)]
            for micro_batch in range(1, accumulate + 1):
                self.enter(step, micro_batch, "forward")
                truth_ranks.begin(model, setup["parallel"], micro_batch == accumulate)
                if self.model_spec["class"] == "mlp":
                    x = torch.randn(setup["batch"], self.model_spec["config"]["width"], device="cuda", dtype=self.dtype)
                    with self.surroundings():
                        out = model(x)
                        squares = self.model_spec["config"]["loss"] == "mean_square"
                        loss = out.pow(2).mean() if squares else out.sum()
                else:
                    vocabulary = self.model_spec["config"]["vocab_size"]
                    ids = torch.randint(0, vocabulary, (setup["batch"], length)).to("cuda")
                    with self.surroundings():
                        if keep:
                            out = model(input_ids=ids, labels=ids)
                            loss = out.loss
                        else:
                            loss = loss_of_ids(ids)
                if not keep:
                    out = None
                self.leave()
                self.enter(step, micro_batch, "backward")
                if self.zero:
                    truth_deepspeed.backward(model, loss, micro_batch == accumulate)
                else:
                    scaled = loss / accumulate if accumulate > 1 else loss
                    if megatron:
                        scaled = self.optimizers[0].scaled(scaled)
                    scaled.backward(retain_graph=leak)
                    del scaled
                if leak:
                    kept.append(loss)
                self.leave()
            self.enter(step, None, "update")
            if self.zero:
                model.step()
                self.leave()
                continue
            for parameter, master in zip(trainable, masters):
                if parameter.grad is not None:
                    master.grad = parameter.grad.float()
            if setup["clip_grad_norm"] is not None and not megatron:
                torch.nn.utils.clip_grad_norm_(masters or model.parameters(), setup["clip_grad_norm"])
            if not setup.get("optimizer_in_backward"):
                for optimizer in self.optimizers:
                    optimizer.step()
                if masters:
                    with torch.no_grad():
                        torch._foreach_copy_(trainable, masters)
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=setup["zero_grad"] == "set-to-none")
            if masters:
                model.zero_grad(set_to_none=setup["zero_grad"] == "set-to-none")
            self.leave()
        self.keep_recording()

    def keep_recording(self):
        """Takes the snapshot while the names of the training loop are still bound."""
        if self.record:
            self.snapshot = self.torch.cuda.memory._snapshot()
            self.torch.cuda.memory._record_memory_history(enabled=None)

    @property
    def dtype(self):
        return self.named(self.setup["dtype"])

    def named(self, dtype):
        return getattr(self.torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype])

    def attention(self):
        """The forced attention kernel, as a context for the whole run: a checkpoint recomputes in backward."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kernels = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }
        forced = kernels.get(self.setup["sdpa_kernel"])
        return sdpa_kernel(forced) if forced else contextlib.nullcontext()

    def surroundings(self):
        """Autocast and the host's small values, as a context for the forward pass."""
        import vramledger_host

        stack = contextlib.ExitStack()
        if self.setup["autocast"]:
            dtype = {"bf16": self.torch.bfloat16, "fp16": self.torch.float16}[self.setup["autocast"]]
            stack.enter_context(self.torch.autocast("cuda", dtype=dtype))
        for name in ("activations", "activations-pinned"):
            if name in self.setup.get("offload", ()):
                saving = self.torch.autograd.graph.save_on_cpu(pin_memory=name.endswith("pinned"))
                stack.enter_context(saving)
        if vramledger_host.emulated():
            stack.enter_context(vramledger_host.HostValues())
        return stack

    def make_model(self):
        """The model without memory."""
        torch, spec, setup = self.torch, self.model_spec, self.setup
        with torch.device("meta"):
            if spec["class"] == "mlp":
                width = spec["config"]["width"]
                count = spec["config"]["layers"]
                model = truth_checkpoint.mlp([torch.nn.Linear(width, width, bias=False, dtype=self.dtype) for _ in range(count)])
            else:
                import transformers

                config = dict(spec["config"])
                config.pop("torch_dtype", None)
                config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
                model = getattr(transformers, spec["class"])._from_config(
                    config, dtype=self.dtype, attn_implementation=setup["attention"]
                )
        if "num_experts_per_tok" in spec["config"]:
            share_tokens_evenly()
        if setup.get("quantize"):
            truth_adapters.quantize(model, setup, self.dtype)
        for name, parameter in model.named_parameters():
            if any(f".{frozen}." in f".{name}." for frozen in setup.get("freeze", ())):
                parameter.requires_grad = False
        truth_checkpoint.checkpoint(model, setup)
        if setup["lora"]:
            model = truth_adapters.adapted(model, setup["lora"], self.named)
        return model

    def load(self):
        setup, model = self.setup, self.make_model()
        model.train()
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parallel = setup["parallel"] or {"kind": None}
        if self.zero:
            truth_deepspeed.start(parallel)
        elif parallel["kind"]:
            import vramledger_ranks

            # DDP wants results of its collectives, which the process group that does nothing has not.
            backend = "nccl" if parallel["kind"] == "ddp" else "fake"
            vramledger_ranks.start(backend, parallel.get("rank", 0), parallel["world"])
        sharded = parallel["kind"] in ("fsdp2", "hsdp")
        on_host = "parameters" in setup.get("offload", ()) and not self.zero
        if sharded:
            truth_ranks.shard(model, parallel, on_host)
        parted = truth_deepspeed.partition(setup) if self.zero else None
        materialize(model, {}, "cpu" if on_host else "cuda", parted)
        if on_host and not sharded:
            use_on_device(model)
        if parallel["kind"] == "megatron-do":
            model = truth_megatron.wrap(model, setup)
        if parallel["kind"] == "ddp":
            model = truth_ranks.replicate(model, parallel)
        return model

    def truth(self):
        torch = self.torch
        statistics = torch.cuda.memory_stats()
        import vramledger_host

        answer = {"provenance": "emulated" if vramledger_host.emulated() else "measured"}
        answer["torch"] = torch.__version__
        transformers = sys.modules.get("transformers")
        answer["transformers"] = transformers.__version__ if transformers else None
        for measure in ("requested", "allocated", "reserved"):
            answer[f"peak_{measure}_bytes"] = max(p[f"peak_{measure}_bytes"] for p in self.phases)
        first = next(p for p in self.phases if p["peak_allocated_bytes"] == answer["peak_allocated_bytes"])
        for key in ("step", "micro_batch", "phase"):
            answer[f"peak_{key}"] = first[key]
        answer["phases"] = self.phases
        answer["after_load_bytes"] = self.phases[0]["end_allocated_bytes"]
        answer["trainable_parameters"] = self.trainable
        answer["num_alloc_retries"] = statistics.get("num_alloc_retries", 0)
        answer["num_ooms"] = statistics.get("num_ooms", 0)
        answer["oom"] = self.oom
        # Of an emulated device only: nobody knows it of a real one.
        context = os.environ.get("VRAMLEDGER_GPU_CONTEXT", 550 << 20)
        answer["context_bytes"] = int(context) if vramledger_host.emulated() else None
        return answer


def share_tokens_evenly():
    """Gives each expert as many rows as the next: on an emulated device no router has chosen any.

    Only the loop over experts, which weights other than bf16 take, looks at it.
    """
    import torch
    import transformers.integrations.moe as moe
    import vramledger_host

    if not vramledger_host.emulated():
        return
    product = moe._grouped_mm

    def even(rows, weight, offs):
        count, experts = len(rows), len(weight)
        ends = [count * (expert + 1) // experts for expert in range(experts)]
        with torch._C.DisableTorchFunction():
            vramledger_host.host_view(offs).copy_(torch.tensor(ends))
        return product(rows, weight, offs)

    moe._grouped_mm = even


def local(tensor):
    """The part of a distributed tensor that lies on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def materialize(module, made, place, parted=None):
    """Puts empty tensors on the device for a model made on `meta`: children first, then parameters, then buffers.
    `parted` takes all but a part of a parameter away."""
    import torch

    def new(tensor):
        if tensor not in made:
            made[tensor] = torch.empty_like(tensor, device="cuda")
        return made[tensor]

    for child in module.children():
        materialize(child, made, place, parted)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if hasattr(parameter, "bnb_quantized"):
                made[parameter] = truth_adapters.packed(module, parameter)
            elif parameter not in made:
                empty = torch.empty_like(parameter, device=place)
                made[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                del empty
                if parted:
                    parted(made[parameter])
            module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = new(buffer)


def use_on_device(model):
    """Parameters of the host are copied to the device wherever a module uses them."""
    import torch
    from torch.nn.utils import parametrize

    class OnDevice(torch.nn.Module):
        def forward(self, parameter):
            return parameter.to("cuda")

    for module in list(model.modules()):
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                parametrize.register_parametrization(module, name, OnDevice(), unsafe=True)


# Frames that say nothing about what a program does.
SILENT = (
    "truth_case.py",
    "truth_checkpoint.py",
    "truth_optimizers.py",
    "vramledger_host.py",
    "torch/nn/modules/module.py",
    "transformers/modeling_layers.py",
    "transformers/utils/deprecation.py",
    "torch/_ops.py",
    "torch/overrides.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/utils/_python_dispatch.py",
)


def site(frames):
    """The two innermost frames of a stack that say something."""
    told, called_twice = [], False
    for frame in frames:
        file = frame["filename"]
        if not file.endswith(SILENT) and file.endswith(".py") and not called_twice:
            told.append(frame)
        # A function that a mode overrides stands on the stack twice: within, and where it asked the mode.
        called_twice = file.endswith("torch/overrides.py")
    return " < ".join(f"{os.path.basename(f['filename'])}:{f['line']}:{f['name']}" for f in told[:2])


def write_events(path, snapshot):
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "wt", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["event", "action", "object", "bytes", "stream", "step", "micro_batch", "phase", "site"])
        out.writerows(events(snapshot["device_traces"][0]))


def events(trace):
    """The rows of an event list: objects and segments numbered, phases taken from the thread that marks them."""
    objects, segments, streams = {}, {}, {}
    counts = [0, 0]
    at = ("0", "", "load")
    number = 0
    for entry in trace:
        action = entry["action"]
        # Autograd's own threads carry no mark: they work in the phase that the program has entered.
        if entry.get("user_metadata"):
            at = tuple(entry["user_metadata"].split(","))
        if action in ("snapshot", "annotate"):
            continue
        name = ""
        if action.startswith("segment"):
            known, prefix, which = segments, "s", 1
        else:
            known, prefix, which = objects, "", 0
        address = entry.get("addr")
        if action in ("alloc", "segment_alloc"):
            known[address] = f"{prefix}{counts[which]}"
            counts[which] += 1
        if action != "oom":
            name = known.get(address, "")
        stream = streams.setdefault(entry["stream"], len(streams))
        told = site(entry.get("frames", [])) if action == "alloc" else ""
        yield [number, action, name, entry["size"], stream, *at, told]
        number += 1


if __name__ == "__main__":
    main()
