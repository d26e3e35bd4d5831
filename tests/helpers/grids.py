"""Cells of grids."""


def arm(cell):
    return cell.values.get("label", cell.values["method"])
