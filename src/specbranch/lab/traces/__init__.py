"""One answer told round by round: what became of every drafted token, and when each model worked."""
