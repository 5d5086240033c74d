"""is_oom: what counts as a lack of memory, on any device, and what does not."""

from __future__ import annotations

import errno

import pytest
import torch

from coat_flux.watch.oom import OutOfMemory, is_oom

LACKS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    torch.cuda.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Caught OutOfMemoryError in DataLoader worker process 0.\nCUDA out of memory."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError("The paging file is too small for this operation to complete. (os error 1455)"),
]
OTHERS = [
    None,
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("this text says out of memory, but its class is another"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
    OutOfMemory("Out of memory in the phase step: explained already"),
]


@pytest.mark.parametrize("error", LACKS, ids=lambda error: f"{type(error).__name__}: {error}"[:40])
def test_a_lack_of_memory(error: BaseException) -> None:
    assert is_oom(error)
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = error
    assert is_oom(wrapped)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__}: {error}"[:40])
def test_something_else(error: BaseException | None) -> None:
    assert not is_oom(error)


def test_a_real_allocation_that_cannot_be_made() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_oom(caught.value)
