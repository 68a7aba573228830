"""What a child's end means: its exit code in words, with what to do."""

from __future__ import annotations

import signal
from dataclasses import dataclass

OK, CRASH, USER_ERROR, STOPPED, OUT_OF_MEMORY = 0, 1, 2, 3, 4

_OWN = {
    OK: ("The run finished.", ""),
    CRASH: ("The trainer crashed.", "The log's last lines hold the traceback; please report it with them."),
    USER_ERROR: ("The job cannot be done as it is set up.", ""),
    STOPPED: ("The run was stopped; starting it again goes on from what it saved last.", ""),
    OUT_OF_MEMORY: ("Out of memory.", "Choose a smaller resolution, fewer frames, a lower rank, quantization, or let the plan stream blocks from RAM."),
}

# NTSTATUS values a Windows process ends with
_WINDOWS = {
    0xC0000005: ("access violation in native code", "Often a driver or a package built for another torch: update the GPU driver, reinstall torch, or set a separate engine python."),
    0xC00000FD: ("stack overflow in native code", "Usually a recursion in a package; the log's last lines name it."),
    0xC0000374: ("heap corruption in native code", "Usually two packages with different runtimes: try a separate engine python."),
    0xC0000409: ("abort in native code (fail fast)", "The log's last lines usually name the check that failed."),
    0xC0000135: ("a DLL was not found", "Install the Visual C++ runtime, or reinstall torch for this Python."),
    0xC000007B: ("a DLL is damaged or for another architecture", "Reinstall torch for this Python."),
    0xC0000142: ("a DLL failed to start", "Often too little page file or a blocked program: restart Windows, allow python in the virus scanner."),
    0xC000001D: ("illegal instruction", "A package was built for a newer CPU than this one."),
    0xC0000017: ("not enough memory", "Enlarge the page file or close other programs."),
    0xC000012D: ("the commit limit was reached", "Enlarge the Windows page file (32 GB and more for big models) and restart."),
    0xC0000006: ("a file could not be read (in-page error)", "The disk or share with the model or cache failed while it was mapped."),
    0xC000013A: ("ended by Ctrl+C or a closed console", "Start it again: it goes on from its last snapshot."),
    0x40010004: ("ended by Windows (shutdown or sign-out)", "Start it again: it goes on from its last snapshot."),
    0xC06D007E: ("a DLL was not found (delay load)", "Install the Visual C++ runtime, or reinstall torch for this Python."),
    0xC06D007F: ("a DLL lacks a function (delay load)", "Two versions of a library are mixed: reinstall torch for this Python."),
    0xE06D7363: ("an uncaught C++ exception", "Often out of memory in native code, or a damaged package; see the log's last lines."),
    0x80000003: ("a breakpoint in native code", "An assertion of a native package failed; see the log's last lines."),
}

_SIGNALS = {
    9: ("killed (SIGKILL)", "If nobody did it by hand, the system ran out of RAM: see `dmesg`; use quantization, fewer data workers, or a cache on disk instead of RAM."),
    11: ("segmentation fault (SIGSEGV)", "Often a driver or a package built for another torch; the log holds the Python stack."),
    6: ("abort (SIGABRT)", "A check in native code failed; the log's last lines usually name it."),
    7: ("bus error (SIGBUS)", "Usually /dev/shm is too small (containers: --shm-size=8g, or num_dataloader_workers: 0) or a mapped file's disk failed."),
    4: ("illegal instruction (SIGILL)", "A package was built for a newer CPU than this one."),
    8: ("arithmetic error (SIGFPE)", "See the log's last lines."),
    15: ("ended (SIGTERM)", "Something asked the process to end: a shutdown, a job scheduler, a container's stop."),
    1: ("hung up (SIGHUP)", "Its terminal was closed."),
}


@dataclass(frozen=True)
class ExitText:
    """One line that names the end, and what to do."""

    message: str
    hint: str = ""


def explain_exit(code: int | None) -> ExitText:
    """Words for an exit code: ours, a signal (-9, or 137 as shells count), or a Windows status (negative or unsigned)."""
    if code is None:
        return ExitText("The trainer has gone without a word.", "Its machine was switched off or the process was killed; starting it again goes on from its last snapshot.")
    if code in _OWN:
        return ExitText(*_OWN[code])
    unsigned = code & 0xFFFFFFFF
    if unsigned in _WINDOWS:
        words, hint = _WINDOWS[unsigned]
        return ExitText(f"The trainer ended with exit code {unsigned} (0x{unsigned:08X}): {words}.", hint)
    number = -code if -65 < code < 0 else code - 128 if 128 < code < 193 else None
    if number is not None:
        words, hint = _SIGNALS.get(number, (_signal_name(number), "See the log's last lines."))
        return ExitText(f"The trainer was ended by signal {number}: {words}.", hint)
    shown = f"{code}" if 0 <= code < 256 else f"{unsigned} (0x{unsigned:08X})"
    return ExitText(f"The trainer ended with exit code {shown}.", "See the log's last lines.")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
