"""The lab: methods compared, costs measured, theory. The engine imports nothing of it."""
