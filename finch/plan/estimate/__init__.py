"""What a run would take, from one step of the recipe on fake tensors: memory by part, collectives, operations, and what to change.

No weight, file of rows or accelerator is needed.
"""
