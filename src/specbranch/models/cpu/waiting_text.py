"""How the threads of a compiled step wait for each other, in LLVM's language.

Owns the barrier and its clocks. A thread looks for a while, then lets others run on its core, and at last sleeps: if
another thread of the step has no core, this one's may be just what it needs. Sleep comes late, as a virtual machine may
lose a core that sleeps. Invariant: whoever is last wakes all that sleep, or they never fell asleep.
"""

from __future__ import annotations

import platform

LOOKS = 64  # at the barrier between two looks at the clock
PATIENCE = 50_000  # nanoseconds that a thread looks before it yields: threads that run are seldom further apart
VIGIL = 1_000_000  # nanoseconds that it waits before it sleeps
NAP = 1_000_000  # nanoseconds that it sleeps at most before it looks again
ARRIVED, SLEEPING = 0, 4  # numbers of a step's header: threads that arrived so far, and threads that sleep
_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of Linux's system call
_WAIT, _WAKE = 128, 129  # what is asked of it, within this process

# of wall time, and of a thread's own time
CLOCKS = (6, 16) if platform.system() == "Darwin" else (1, 3)


def waiting() -> str:
    """Write `now`, the nanoseconds of a clock, and `meet`, the barrier; `meet` returns the nanoseconds it slept."""
    # A core that says it waits leaves what it shares to the other thread on it.
    arm = platform.machine() in ("aarch64", "arm64")
    pause, argument = ("llvm.aarch64.hint", "i32") if arm else ("llvm.x86.sse2.pause", "")
    return f"""declare void @{pause}({argument})
declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_yield()
{_sleep()}
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
define internal i64 @meet(ptr %header, i64 %expected) {{
begin:
  %sleeping = getelementptr i64, ptr %header, i64 {SLEEPING}
  %before = atomicrmw add ptr %header, i64 1 seq_cst
  %own = add i64 %before, 1
  %last = icmp eq i64 %own, %expected
  br i1 %last, label %call, label %wait
call:
  %asleep = load atomic i64, ptr %sleeping seq_cst, align 8
  %some = icmp sgt i64 %asleep, 0
  br i1 %some, label %wake, label %alone
wake:
  call void @wake(ptr %header)
  br label %alone
alone:
  ret i64 0
wait:
  %look = phi i64 [0, %begin], [%look.next, %patience], [0, %clock], [0, %yield], [0, %nap]
  %since = phi i64 [0, %begin], [%since, %patience], [%since.now, %clock], [%since.now, %yield], [%since.now, %nap]
  %slept = phi i64 [0, %begin], [%slept, %patience], [%slept, %clock], [%slept, %yield], [%slept.now, %nap]
  %arrived = load atomic i64, ptr %header acquire, align 8
  %all = icmp sge i64 %arrived, %expected
  br i1 %all, label %onwards, label %patience
patience:
  call void @{pause}({argument and "i32 1"})
  %look.next = add i64 %look, 1
  %often = icmp sge i64 %look.next, {LOOKS}
  br i1 %often, label %clock, label %wait
clock:
  %time = call i64 @now(i32 {CLOCKS[0]})
  %first = icmp eq i64 %since, 0
  %since.now = select i1 %first, i64 %time, i64 %since
  %waited = sub i64 %time, %since.now
  %long = icmp sge i64 %waited, {PATIENCE}
  br i1 %long, label %offer, label %wait
offer:
  %longer = icmp sge i64 %waited, {VIGIL}
  br i1 %longer, label %nap, label %yield
yield:
  %ignored = call i32 @sched_yield()
  br label %wait
nap:
  %one.more = atomicrmw add ptr %sleeping, i64 1 seq_cst
  call void @sleep(ptr %header, i64 %arrived)
  %one.less = atomicrmw sub ptr %sleeping, i64 1 seq_cst
  %after = call i64 @now(i32 {CLOCKS[0]})
  %napped = sub i64 %after, %time
  %slept.now = add i64 %slept, %napped
  br label %wait
onwards:
  ret i64 %slept
}}"""


def _sleep() -> str:
    """Write `sleep`, until the count is another than the given one or a nap is over, and `wake`; where there is no
    futex, a sleep is short and nobody is woken."""
    number = _FUTEX.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return f"""declare i32 @usleep(i32)
define internal void @sleep(ptr %count, i64 %given) {{
  %ignored = call i32 @usleep(i32 {PATIENCE // 1000})
  ret void
}}
define internal void @wake(ptr %count) {{
  ret void
}}"""
    call = f"call i64 (i64, ...) @syscall(i64 {number}, ptr %count, "
    return f"""declare i64 @syscall(i64, ...)
define internal void @sleep(ptr %count, i64 %given) {{
  %nap = alloca [2 x i64]
  store i64 0, ptr %nap
  %rest.p = getelementptr i64, ptr %nap, i64 1
  store i64 {NAP}, ptr %rest.p
  %low = and i64 %given, 4294967295
  %ignored = {call}i64 {_WAIT}, i64 %low, ptr %nap, ptr null, i64 0)
  ret void
}}
define internal void @wake(ptr %count) {{
  %ignored = {call}i64 {_WAKE}, i64 2147483647, ptr null, ptr null, i64 0)
  ret void
}}"""
