"""Telemetry: facts about the machine, samples of its utilisation during a run, and the time of steps by phase."""
