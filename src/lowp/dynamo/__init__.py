"""Operations as registered operators: what torch.compile sees of them."""
