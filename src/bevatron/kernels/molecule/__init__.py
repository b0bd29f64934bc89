"""Operators of message passing and attention on batches of molecules."""
