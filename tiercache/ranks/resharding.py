"""stub"""


def reshard(*a, **k):
    raise NotImplementedError
