"""Records the memory of a training program from outside: phases, owners, steps and the end, its script untouched.

Into the folder VRAMLEDGER_RECORD go, when the program ends in whatever way,

    snapshot.pickle   the allocator's own recording; `user_metadata` of an entry is `MARK:MODULE`, the number of the
                      mark it follows and the path of the innermost module at work (empty outside of one). An entry of
                      another thread (autograd's) has none and belongs to the mark of the entry before it.
    run.json          {"format": "vramledger-recording/1", "torch", "device", "steps", "end": "stopped"|"finished"|
                      "failed", "error": null|text, "marks": [...], "labels": [...], "ooms": [...], "final": {...},
                      "parameters": {"total", "trainable", "bytes"}}
    progress.jsonl    a line for every mark, as it happens.

A mark: {"mark", "step", "micro_batch", "phase", "allocated_bytes", "requested_bytes", "reserved_bytes",
"active_bytes"}, the bytes as PyTorch counts them when the mark is set. Marks of one step, micro_batch and phase that
follow each other are one phase; the phase `end` is what comes after the last step and belongs to none.
Labels: {"mark", "category", "objects": [[address, name], ...]} name the blocks that live at those addresses when that
mark is set; the last label of a block is right. Those of the category `input` are what a model is called with: a
forward phase begins where they are made, and the phase `end` too.
Parameters are counted as the model has them, and their bytes as they lie on this device.

With VRAMLEDGER_ONE_RANK the process is one rank of a job whose other ranks are absent (see `vramledger_ranks`).

VRAMLEDGER_STEPS (default 3, or `all`) optimizer steps are run; then the program sees SystemExit(0) where it would begin
the next one.
"""

import bisect
import collections.abc
import functools
import gc
import json
import os
import pickle
import sys
import threading
import time
import weakref

ENTRIES = 10_000_000
STATISTICS = {
    "allocated_bytes": "allocated_bytes",
    "requested_bytes": "requested_bytes",
    "reserved_bytes": "reserved_bytes",
    "active_bytes": "active_bytes",
}


def start(torch):
    """Called once PyTorch is there: the recording begins when the program first touches the device.

    Answers what is to be called when the program has ended and its own handlers have run.
    """
    recorder = Recorder(torch, os.environ["VRAMLEDGER_RECORD"], os.environ.get("VRAMLEDGER_STEPS", "3"))
    # Functions are wrapped before the script can import them by name; until `begin` the wrappers do nothing.
    recorder.wrap()
    if os.environ.get("VRAMLEDGER_ONE_RANK"):
        import vramledger_ranks

        vramledger_ranks.stand_in()
    torch.cuda._lazy_call(recorder.begin)
    return recorder.leave_process


class Stop(SystemExit):
    """Ends the program when the wanted steps are done; not an Exception, so scripts do not swallow it."""


class Recorder:
    """Follows one process; others of the same program (workers, launchers) are left alone."""

    def __init__(self, torch, folder, steps):
        self.torch, self.folder = torch, folder
        self.wanted = None if steps == "all" else int(steps)
        self.process = None
        self.marks, self.labels, self.ooms = [], [], []
        self.error, self.code, self.end = None, 0, "finished"
        # Steps done, backward passes since the last of them, and where the program is now.
        self.steps, self.backwards, self.at = 0, 0, (0, None, "load")
        self.steppers = weakref.WeakKeyDictionary()
        self.roots, self.names = weakref.WeakSet(), weakref.WeakKeyDictionary()
        # The optimizer at work, and the mark of a step that has not done anything yet.
        self.stepper, self.begun = None, None
        self.labelled = {}
        self.local = threading.local()
        # The operators of the forward pass are numbered; where each module's begin, by number and name.
        self.sequence = []
        self.counted = {"total": 0, "trainable": 0, "bytes": 0}
        self.host = None
        # The allocator of torch 2.6 takes no notes (that of 2.11 does): there the clock tells what belongs where.
        self.set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        self.places = []

    # The beginning.

    def begin(self):
        """Runs when CUDA starts: in the first process that does so, everything is hooked up."""
        try:
            owner = os.open(os.path.join(self.folder, "owner"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return
        os.write(owner, str(os.getpid()).encode())
        os.close(owner)
        self.process = os.getpid()
        self.progress = open(os.path.join(self.folder, "progress.jsonl"), "w", buffering=1)
        torch = self.torch
        memory = torch.cuda.memory
        memory._record_memory_history(max_entries=ENTRIES, stacks="python")
        # The recording is ours; a script that starts or stops its own still finds its snapshots.
        memory._record_memory_history = lambda *arguments, **options: None
        torch._C._cuda_attach_out_of_memory_observer(self.out_of_memory)
        self.hook()
        self.follow_exit()
        self.mark(0, None, "load")
        from vramledger_host import HostValues, emulated

        if emulated():
            self.host = HostValues()
            self.host.__enter__()

    def hook(self):
        """PyTorch's own global hooks."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        module = self.torch.nn.modules.module
        module.register_module_forward_pre_hook(self.before_module)
        module.register_module_forward_hook(self.after_module, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.enter_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self.leave_step(optimizer))

    def wrap(self):
        """What has no global hook: the backward call, clipping, unscaling, zero_grad."""
        torch = self.torch
        autograd, utilities = torch.autograd, torch.nn.utils
        autograd.backward = self.around(autograd.backward, self.enter_backward, self.leave_backward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrapped = self.around(getattr(utilities, name), self.enter_update)
            setattr(utilities, name, wrapped)
            setattr(utilities.clip_grad, name, wrapped)
        torch.amp.GradScaler.unscale_ = self.around(torch.amp.GradScaler.unscale_, self.enter_update)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            owner.zero_grad = self.around(owner.zero_grad, None, self.after_zero_grad)

    def around(self, function, before=None, after=None):
        """The function with calls before and after it, in the recorded process only."""

        @functools.wraps(function)
        def wrapper(*arguments, **options):
            follows = self.process == os.getpid()
            if before and follows:
                before()
            try:
                return function(*arguments, **options)
            finally:
                if after and follows:
                    after()

        return wrapper

    def follow_exit(self):
        """Notes with which code the program ends, and writes even if it leaves at once."""
        leave = os._exit

        def leave_at_once(code):
            if os.getpid() == self.process:
                self.write()
            leave(code)

        self.leave_at_once = leave
        os._exit = leave_at_once
        exit_, hook = sys.exit, sys.excepthook

        def noted_exit(code=None):
            self.code = code if isinstance(code, int) else int(code is not None)
            exit_(code)

        def noted_exception(kind, error, trace):
            self.code, self.end = (130 if kind is KeyboardInterrupt else 1), "failed"
            self.error = f"{kind.__name__}: {error}"
            hook(kind, error, trace)

        sys.exit, sys.excepthook = noted_exit, noted_exception

    # Marks.

    def mark(self, step, micro_batch, phase):
        """Says where the program is from now on."""
        self.at = (step, micro_batch, phase)
        statistics = self.torch._C._cuda_memoryStats(self.torch.cuda.current_device())
        mark = {"mark": len(self.marks), "step": step, "micro_batch": micro_batch, "phase": phase}
        for name, key in STATISTICS.items():
            mark[name] = statistics[key]["all"]["current"]
        self.marks.append(mark)
        self.progress.write(json.dumps(mark) + "\n")
        self.tell()

    def tell(self):
        """Gives this thread's allocations the mark and the module at work."""
        stack = getattr(self.local, "modules", None)
        place = f"{len(self.marks) - 1}:{stack[-1] if stack else ''}"
        if self.set_metadata:
            self.set_metadata(place)
        elif threading.current_thread() is threading.main_thread():
            self.places.append((time.time_ns() // 1000, place))

    def before_module(self, module, arguments):
        if self.torch.compiler.is_compiling():
            return
        if not hasattr(self.local, "modules"):
            self.local.modules = []
        stack = self.local.modules
        if not stack and threading.current_thread() is threading.main_thread():
            self.enter_forward(module, arguments)
        stack.append(self.names.get(module) or type(module).__name__)
        self.follow_sequence(stack[-1])
        self.tell()

    def after_module(self, module, arguments, result):
        if self.torch.compiler.is_compiling():
            return
        stack = getattr(self.local, "modules", None)
        if stack:
            stack.pop()
            self.follow_sequence(stack[-1] if stack else "")
            self.tell()

    def follow_sequence(self, module):
        """Notes that the operators from here on are of `module`; those of backward have the same numbers."""
        self.sequence.append((self.torch.autograd._get_sequence_nr(), module))

    def enter_forward(self, module, arguments):
        inputs = list(self.inputs(arguments))
        if self.is_done() and self.end == "finished":
            # What the script does after its last step, printing for one, it has done.
            self.end, self.code = "stopped", 0
            self.mark(self.steps, None, "end")
            self.label("input", inputs, again=True)
            raise Stop(0)
        self.adopt(module)
        self.begun = None
        where = (self.steps + 1, self.backwards + 1, "forward")
        if self.at != where:
            self.sequence.clear()
        if self.at != where or inputs:
            self.mark(*where)
        self.label_parameters()
        self.label("input", inputs, again=True)

    def enter_backward(self):
        if self.host:
            self.host.active = False
        self.mark(self.steps + 1, self.backwards + 1, "backward")

    def leave_backward(self):
        if self.host:
            self.host.active = True
        self.mark(self.steps + 1, self.backwards + 1, "backward")
        self.backwards += 1
        self.label_gradients()

    def enter_update(self):
        if self.host:
            self.host.active = False
        if self.at[2] != "update":
            self.mark(self.steps + 1, None, "update")

    def enter_step(self, optimizer):
        self.stepper = optimizer
        self.steppers.setdefault(optimizer, 0)
        self.enter_update()

    def leave_step(self, optimizer):
        """After a step: its state has a name, and a step is done when the first optimizer has made one more."""
        if self.host:
            self.host.active = True
        self.mark(self.steps + 1, None, "update")
        self.label_state(optimizer)
        self.stepper = None
        self.steppers[optimizer] += 1
        done = max(self.steppers.values())
        if done > self.steps:
            self.steps, self.backwards = done, 0

    def after_zero_grad(self):
        """The end of a step, when it comes after the optimizer's."""
        if self.at[2] == "update" and self.at[0] == self.steps:
            self.mark(*((self.steps, None, "end") if self.is_done() else (self.steps + 1, 1, "forward")))
            self.begun = self.marks[-1]

    def is_done(self):
        return self.wanted is not None and self.steps >= self.wanted

    # Owners, by storage.

    def inputs(self, arguments):
        """The tensors that the module about to run is called with and that no operator of a model made."""
        frame = sys._getframe(2)
        # The hooks of all modules are not told of arguments by name; the frame that calls them knows.
        while frame is not None and "kwargs" not in frame.f_locals:
            frame = frame.f_back
        named = frame.f_locals["kwargs"] if frame is not None else {}
        rest = [("input", named if isinstance(named, dict) else {}), ("input", arguments)]
        while rest:
            name, value = rest.pop()
            if isinstance(value, collections.abc.Mapping):
                rest.extend((str(key), part) for key, part in reversed(list(value.items())))
            elif isinstance(value, (list, tuple)):
                rest.extend((name, part) for part in reversed(value))
            elif isinstance(value, self.torch.Tensor) and value.grad_fn is None and self.address(value):
                if value.untyped_storage().nbytes() == value.numel() * value.element_size():
                    yield name, value

    def parameters(self):
        """Every parameter that is known, by name, each once."""
        seen = set()
        for root in list(self.roots):
            for name, parameter in root.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
        for optimizer in list(self.steppers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield "parameter", parameter

    def adopt(self, module):
        """A module whose parts have their names from it."""
        if module not in self.roots:
            self.roots.add(module)
            for name, part in module.named_modules():
                self.names.setdefault(part, name)

    def find_modules(self):
        """Adopts what stands in no other module: nothing has run yet that would have told."""
        kind = self.torch.nn.Module
        # By type: some objects do things when they are asked for their class.
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
        parts = {id(part) for module in modules for part in module.children()}
        for module in modules:
            if id(module) not in parts:
                self.adopt(module)

    def label_parameters(self):
        parameters = list(self.parameters())
        self.label("parameter", parameters)
        local = [getattr(parameter, "_local_tensor", parameter) for _, parameter in parameters]
        self.counted = {
            "total": sum(parameter.numel() for _, parameter in parameters),
            "trainable": sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad),
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.is_cuda),
        }
        self.label("buffer", (pair for root in list(self.roots) for pair in root.named_buffers()))

    def label_gradients(self):
        gradients = ((name, p.grad) for name, p in self.parameters() if p.grad is not None)
        self.label("gradient", gradients, again=True)

    def label_state(self, optimizer):
        names = {id(p): name for name, p in self.parameters()}
        state = (
            (f"{names.get(id(p), 'parameter')}.{key}", value)
            for p, values in optimizer.state.items()
            if isinstance(values, dict)
            for key, value in values.items()
        )
        self.label("optimizer_state", state)

    def label(self, category, tensors, again=False):
        """Names the storages of tensors on the device; those already named only if they are made anew each time."""
        objects = []
        for name, tensor in tensors:
            address = self.address(tensor)
            if address and (again or self.labelled.get(address) != (category, name)):
                self.labelled[address] = (category, name)
                objects.append([address, name])
        if objects:
            self.labels.append({"mark": len(self.marks) - 1, "category": category, "objects": objects})

    def address(self, tensor):
        """Where a tensor's storage lies on the device; 0 for anything else."""
        torch = self.torch
        if not isinstance(tensor, torch.Tensor):
            return 0
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not tensor.is_cuda or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
            return 0
        return tensor.untyped_storage().data_ptr()

    # The end.

    def module_of(self, node):
        """The module whose forward pass ran the operator that `node` of the backward pass belongs to."""
        if node is None or not hasattr(node, "_sequence_nr"):
            return ""
        index = bisect.bisect_right(self.sequence, node._sequence_nr(), key=lambda begin: begin[0]) - 1
        return self.sequence[index][1] if index >= 0 else ""

    def out_of_memory(self, device, requested, total, free):
        step, micro_batch, phase = self.at
        node = self.torch._C._current_autograd_node()
        self.ooms.append(
            {
                "step": step,
                "micro_batch": micro_batch,
                "phase": phase,
                "device": device,
                "requested_bytes": requested,
                "capacity_bytes": total,
                "free_bytes": free,
                "module": (getattr(self.local, "modules", None) or [""])[-1] or self.module_of(node),
                "operator": node.name() if node is not None else None,
            }
        )
        if len(self.ooms) == 1:
            # What a phase has made so far gets its name only when the phase is over.
            self.begun = None
            self.mark(step, micro_batch, phase)
            if not self.roots:
                self.find_modules()
            self.label_parameters()
            self.label_gradients()
            if self.stepper is not None:
                self.label_state(self.stepper)
            self.write()

    def write(self):
        """Writes the recording; each file appears whole or not at all."""
        if self.begun is not None and self.begun["phase"] != "end":
            # Nothing of the step came: the program was at its end.
            self.begun.update(step=self.steps, micro_batch=None, phase="update")
        memory = self.torch.cuda.memory
        statistics = self.torch.cuda.memory_stats()
        run = {
            "format": "vramledger-recording/1",
            "torch": self.torch.__version__,
            "device": self.torch.cuda.current_device(),
            "steps": self.steps,
            "end": self.end,
            "error": self.error,
            "marks": self.marks,
            "labels": self.labels,
            "ooms": self.ooms,
            "parameters": self.counted,
            "final": {key: value for key, value in statistics.items() if ".all." in key or key.startswith("num_")},
        }
        self.replace("run.json", lambda file: file.write(json.dumps(run).encode()))
        snapshot = memory._snapshot()
        if not self.set_metadata:
            self.note_places(snapshot)
        self.replace("snapshot.pickle", lambda file: pickle.dump(snapshot, file, protocol=4))

    def note_places(self, snapshot):
        """Adds by the clock what the allocator of an older PyTorch could not note itself."""
        times = [at for at, _ in self.places]
        for trace in snapshot["device_traces"]:
            for entry in trace:
                index = bisect.bisect_right(times, entry["time_us"]) - 1
                entry["user_metadata"] = self.places[max(index, 0)][1]

    def replace(self, name, fill):
        path = os.path.join(self.folder, name)
        with open(path + ".part", "wb") as file:
            fill(file)
        os.replace(path + ".part", path)

    def leave_process(self):
        """The last handler to run: what is left of the interpreter's end is skipped, for a thread may still need it."""
        if os.getpid() != self.process:
            return
        self.write()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        self.leave_at_once(self.code)
