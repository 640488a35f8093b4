"""Operators for CPUs, written in C++ and compiled where they run."""
