"""One rank of a job in one process: the others are absent, and whatever is asked of them is answered here.

The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like) say which rank it is.
"""

import functools
import os

import torch.distributed as dist


class AbsentRanks(dist.Store):
    """A store in which everybody has arrived and every key is there."""

    def __init__(self, world):
        super().__init__()
        self.world, self.kept = world, {}

    def set(self, key, value):
        self.kept[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        # What another rank would have set: an identity of NCCL has 128 bytes.
        return self.kept.get(key, bytes(128))

    def add(self, key, amount):
        # A barrier counts the ranks that have come: all of them.
        return self.world

    def check(self, keys):
        return True

    def wait(self, keys, timeout=None):
        pass

    def compare_set(self, key, expected, desired):
        self.set(key, desired)
        return self.kept[key]

    def delete_key(self, key):
        return self.kept.pop(key, None) is not None

    def num_keys(self):
        return len(self.kept)

    def set_timeout(self, timeout):
        pass


def start(backend, rank, world):
    """Initialises the default process group for one rank of `world`."""
    if backend == "fake":
        # Imported for what it registers.
        import torch.testing._internal.distributed.fake_pg as fake

        dist.init_process_group("fake", rank=rank, world_size=world, store=fake.FakeStore())
    else:
        dist.init_process_group(backend, rank=rank, world_size=world, store=AbsentRanks(world))


def stand_in():
    """Lets a script's own `init_process_group` find everybody present, whichever way it looks for them."""
    module = dist.distributed_c10d
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, **rest):
        world = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        store = AbsentRanks(world)
        return original(backend, timeout=timeout, world_size=world, rank=rank, store=store, **rest)

    module.init_process_group = dist.init_process_group = init_process_group
