"""My tool: what is left in stock."""

STOCK = {"apples": 12, "books": 7, "coins": 340, "stamps": 58}


def stock(item: str) -> str:
    """
    Say how many of an item are left.

    Args:
        item: name of the item, such as apples
    """
    with open("asked.txt", "a") as file:
        file.write(item + "\n")
    return str(STOCK[item])
