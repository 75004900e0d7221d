"""How long a thread that moves bytes waits for the interpreter when another one computes."""

from __future__ import annotations

import sys

SWITCH_INTERVAL_S = 0.001


def take_turns_often() -> None:
    """Let this process's threads take turns every millisecond instead of every five.

    Each system call on the arena gives the interpreter up and has to get it back, some dozens of times in a large
    push; while another thread runs Python, each time costs one interval. It is a setting of the whole process: the
    daemons make it, and a program that embeds the planes decides for itself.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
