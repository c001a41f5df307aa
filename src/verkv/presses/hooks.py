"""Hooks on a model that several threads share: each hears the forward passes of its own thread only."""

import threading

from torch.utils.hooks import RemovableHandle

_REGISTERING = threading.Lock()


def register_hook(register, hook) -> RemovableHandle:
    """Register a hook that only answers to forward passes of the thread that registers it.

    Parameters
    ----------
    register : callable
        A module's ``register_forward_hook`` or ``register_forward_pre_hook``.
    hook : callable
        Takes what torch passes to a hook registered with ``with_kwargs=True``.

    Returns
    -------
    RemovableHandle
    """
    thread = threading.get_ident()

    # torch marks a hook as one that takes kwargs only after it has added it, and takes the marks away one by one. A
    # thread whose forward pass falls between two such steps calls the hook without kwargs, so who is calling must be
    # known before what is passed is unpacked.
    def hook_of_this_thread(*passed):
        return hook(*passed) if threading.get_ident() == thread else None

    # torch counts hooks in one number, read and raised in two steps: of two threads that do so at once, one would lose
    # its hook to the other.
    with _REGISTERING:
        return register(hook_of_this_thread, with_kwargs=True)
