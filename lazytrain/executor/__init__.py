"""Runs a StepProgram on a device. ``run.train`` is the entry; importing this package imports no torch."""
