"""Nodes: who they are (names, lists, hostfiles), whether they are fit for a job (preflight), alone and together."""
