"""The C++ half. To import it loads it."""

from fake_device import building

extension = building.load()
