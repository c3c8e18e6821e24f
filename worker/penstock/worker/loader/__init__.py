"""A user's loader, and the code that brings the loader to any position in its stream of batches.

A *slot* is a logical worker of a *box* (data-parallel rank). A *restart point* is a state of the slot's loader with its
position; a *launch* or *attempt* is one start of the training job; an *abandoned* epoch was ended by `break`.
"""
