"""Who takes part in a round of plain decoding."""

from __future__ import annotations

from specbranch.config import SamplingParams
from specbranch.core.members import Member
from specbranch.core.orders import Branch, Orders
from specbranch.core.plain_rounds import LEAST_PLAIN, PlainOrders, PlainReports, PlainRounds
from specbranch.core.request import Request
from specbranch.core.session import Session


class Decoding:
    """An executor that decodes every session plainly."""

    decodes_plainly = True

    def decodes(self, session: int, length: int) -> bool:
        return True

    def decode(self, orders: PlainOrders) -> PlainReports | None:
        return None


def member(number: int, tokens: tuple[int, ...] = (), goes_on: bool = False) -> Member:
    session = Session(number, (1, 2, 3), Request(SamplingParams(max_tokens=9), number, 3), 99)
    verify = session.verify_plainly() if goes_on else session.verify(Branch(0, tokens, (1.0,) * len(tokens)))
    one = Member(session, (_ for _ in ()), 0, Orders(verify=verify))
    one.prefill_done = True
    return one


def test_who_verifies_waits_for_no_step_that_is_not_launched() -> None:
    """Sessions whose drafts came back empty ask for one token each; no step behind it would take the others' rows."""
    other = member(9, (4, 5))
    asking = [member(number) for number in range(LEAST_PLAIN)]
    assert PlainRounds(Decoding()).batch([*asking, other], chunked=True) is None
    batch = PlainRounds(Decoding()).batch([*asking, member(8, goes_on=True), other], chunked=True)
    assert batch is not None and batch.others == [other] and len(batch.decoding) == LEAST_PLAIN + 1
