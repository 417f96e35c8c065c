"""Processes that make up a torch.distributed group, started once for many tests."""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist


class Ranks:
    """`size` processes of a group, each with a GPU where the backend is NCCL; `run` calls a function on each."""

    def __init__(self, size, backend="gloo", timeout=180):
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{self.folder.name}/rendezvous"
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, size, rendezvous, backend, timeout), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads

    def run(self, function, *args):
        """The result of function(*args) on each rank, or a Failure where it raised."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        results = [pickle.loads(pipe.recv_bytes()) for pipe in self.pipes]
        return [Failure(*result) if failed else result for failed, result in results]

    def results(self, function, *args):
        """The result of function(*args) on each rank; fails if a rank raised."""
        results = self.run(function, *args)
        for rank, result in enumerate(results):
            assert not isinstance(result, Failure), f"rank {rank}: {result.trace}"
        return results

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


class Failure:
    """An exception that a rank raised."""

    def __init__(self, kind, message, trace):
        self.kind, self.message, self.trace = kind, message, trace

    def __repr__(self):
        return f"{self.kind}: {self.message}"


def serve(pipe, rank, size, rendezvous, backend, timeout):
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while (work := pickle.loads(pipe.recv_bytes())) is not None:
        function, args = work
        try:
            result = False, function(*args)
        except Exception as error:
            result = True, (type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
    dist.destroy_process_group()
