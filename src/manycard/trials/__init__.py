"""Finding out what a plan is made from: short trials on copies, on the cards that are here.

subject    what is tried: a model, its optimizers, a loss and a batch, made anew for each trial
estimate   what is computed, counted without a card
one_card   one card's steps by size of batch, and the host's part in them
links      copies and all-reduces between cards
gather     all of it as `Facts`
confirm    one candidate, as it would run
"""
