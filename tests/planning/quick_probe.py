"""`spartito.planning.probe` with so few steps and rounds that it measures nothing, but does all."""

from __future__ import annotations

from spartito.planning import probe, reference

if __name__ == "__main__":
    probe.ROUNDS, probe.COMPUTES, probe.MOVED, probe.WRITTEN = 1, 0.01, 1 << 20, 1 << 20
    reference.STEPS, reference.EPOCHS, reference.SECONDS = (8, 24), 1, 0.1
    probe.main()
