"""LLVM text of the barrier at which the threads of a compiled step wait for each other.

Owns the barrier and its clocks. A thread polls the count of arrived threads. From time to time it yields its core, as a
thread that it waits for may need it. Invariant: a thread never sleeps. With futexes, steps on a virtual machine took up
to twice as long while its host took cores away (docs/log.md, 2026-11-17).
"""

from __future__ import annotations

import platform

BARRIER_LOOKS = 64  # polls of the barrier between two looks at the clock
PATIENCE = 200_000  # nanoseconds between two yields: running threads are seldom further apart

# clocks of wall time and of a thread's CPU time
CLOCK_IDS = (6, 16) if platform.system() == "Darwin" else (1, 3)


def waiting() -> str:
    """Write `now`, the nanoseconds of a clock, and `meet`, the barrier."""
    # The pause instruction leaves shared units of a core to its other hardware thread.
    arm = platform.machine() in ("aarch64", "arm64")
    pause, argument = ("llvm.aarch64.hint", "i32") if arm else ("llvm.x86.sse2.pause", "")
    return f"""declare void @{pause}({argument})
declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_yield()
define internal i64 @now(i32 %clock) {{
  %time = alloca [2 x i64]
  %ignored = call i32 @clock_gettime(i32 %clock, ptr %time)
  %seconds = load i64, ptr %time
  %rest.p = getelementptr i64, ptr %time, i64 1
  %rest = load i64, ptr %rest.p
  %scaled = mul i64 %seconds, 1000000000
  %all = add i64 %scaled, %rest
  ret i64 %all
}}
define internal void @meet(ptr %count, i64 %expected) {{
begin:
  %before = atomicrmw add ptr %count, i64 1 acq_rel
  br label %wait
wait:
  %look = phi i64 [0, %begin], [%look.next, %patience], [0, %clock], [0, %yield]
  %since = phi i64 [0, %begin], [%since, %patience], [%since.now, %clock], [%time, %yield]
  %arrived = load atomic i64, ptr %count acquire, align 8
  %all = icmp sge i64 %arrived, %expected
  br i1 %all, label %onwards, label %patience
patience:
  call void @{pause}({argument and "i32 1"})
  %look.next = add i64 %look, 1
  %often = icmp sge i64 %look.next, {BARRIER_LOOKS}
  br i1 %often, label %clock, label %wait
clock:
  %time = call i64 @now(i32 {CLOCK_IDS[0]})
  %first = icmp eq i64 %since, 0
  %since.now = select i1 %first, i64 %time, i64 %since
  %waited = sub i64 %time, %since.now
  %long = icmp sge i64 %waited, {PATIENCE}
  br i1 %long, label %yield, label %wait
yield:
  %ignored = call i32 @sched_yield()
  br label %wait
onwards:
  ret void
}}"""
