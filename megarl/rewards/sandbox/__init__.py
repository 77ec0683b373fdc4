"""Judgement of text that a model wrote: processes that the kernel keeps from doing anything but compute.

The children are run by path and import nothing of megarl.
"""
