"""Faults injected into real runs, and what must hold after each: see docs/reliability.md."""
