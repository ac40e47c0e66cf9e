"""Hydra multirun sweeps: trials that run as processes of their own and go on where they stood."""
