"""The garments of the example clothing set: outlines, folds, seams and trimmings, in the frame of `garment_sheet`."""

from __future__ import annotations

from garment_sheet import COLOURS, Fabric, Fold, Sheet, flip, mirror

SHADOW, LIGHT = -0.16, 0.1


def both_sides(*folds: Fold) -> list[Fold]:
    """Folds on the right side and their mirror images."""
    return [one for path, width, strength in folds for one in ((path, width, strength), (flip(path), width, strength))]


def tshirt(sheet: Sheet, fabric: Fabric) -> None:
    """A short-sleeved T-shirt with a round neck."""
    lining = fabric.darker(0.62)
    sheet.part(mirror([(0, 0.03), (0.08, 0.03, 0.13, 0.015), (0.11, 0.1, 0.05, 0.135, 0, 0.135)]), lining)
    sleeve = [
        (0.27, 0.06),
        (0.37, 0.1, 0.44, 0.17, 0.495, 0.31),
        (0.44, 0.355, 0.385, 0.375),
        (0.36, 0.31, 0.272, 0.25),
    ]
    sleeve_folds = both_sides(
        ([(0.3, 0.25), (0.37, 0.22, 0.42, 0.24)], 0.02, SHADOW), ([(0.3, 0.15), (0.4, 0.2)], 0.03, LIGHT)
    )
    for outline in (sleeve, flip(sleeve)):
        sheet.part(outline, fabric, sleeve_folds)
    cuff = [(0.487, 0.292), (0.43, 0.34, 0.376, 0.356)]
    sheet.stitches(cuff, fabric)
    sheet.stitches(flip(cuff), fabric)
    body = [(0, 0.135), (0.05, 0.135, 0.11, 0.1, 0.13, 0.015), (0.2, 0.03, 0.285, 0.07), (0.265, 0.16, 0.285, 0.26)]
    body += [(0.275, 0.5, 0.275, 0.7, 0.29, 0.96), (0.15, 0.985, 0, 0.985)]
    folds = both_sides(
        ([(0.275, 0.27), (0.2, 0.36, 0.1, 0.4)], 0.03, SHADOW),
        ([(0.27, 0.32), (0.22, 0.45, 0.2, 0.6)], 0.03, LIGHT),
        ([(0.26, 0.62), (0.2, 0.72, 0.14, 0.9)], 0.035, SHADOW * 0.8),
    )
    folds += [
        ([(-0.03, 0.55), (0.0, 0.75, 0.05, 0.95)], 0.04, SHADOW * 0.6),
        ([(0.06, 0.5), (0.07, 0.9)], 0.04, LIGHT * 0.7),
    ]
    sheet.part(mirror(body), fabric, folds)
    neck = [(0.122, 0.02), (0.105, 0.105, 0.05, 0.146, 0, 0.146)]
    sheet.line(mirror(neck), fabric.darker(0.86).colour, 0.022)
    sheet.stitches([(0.283, 0.94), (0.15, 0.965, 0, 0.965)], fabric)
    sheet.stitches([(-0.283, 0.94), (-0.15, 0.965, 0, 0.965)], fabric)


def long_sleeves(sheet: Sheet, fabric: Fabric) -> None:
    """Two hanging sleeves with ribbed cuffs."""
    sleeve = [(0.22, 0.09), (0.36, 0.12, 0.4, 0.22, 0.43, 0.45), (0.47, 0.65, 0.482, 0.87), (0.43, 0.9, 0.385, 0.885)]
    sleeve += [(0.35, 0.6, 0.325, 0.5), (0.3, 0.4, 0.25, 0.3)]
    cuff = [(0.48, 0.85), (0.483, 0.9, 0.474, 0.94), (0.43, 0.96, 0.392, 0.945), (0.38, 0.9, 0.381, 0.865)]
    folds = both_sides(
        ([(0.34, 0.5), (0.38, 0.47, 0.43, 0.5)], 0.022, SHADOW),
        ([(0.35, 0.56), (0.4, 0.57, 0.44, 0.54)], 0.018, SHADOW * 0.8),
        ([(0.37, 0.2), (0.42, 0.45, 0.45, 0.8)], 0.03, LIGHT),
        ([(0.38, 0.82), (0.43, 0.78, 0.47, 0.8)], 0.018, SHADOW),
    )
    for side in (list, flip):
        sheet.part(side(sleeve), fabric, folds)
        sheet.part(side(cuff), fabric.darker(0.88), edge=0.2)


def waist_rib(sheet: Sheet, fabric: Fabric, width: float) -> None:
    """A ribbed band at the hem."""
    sheet.part(
        mirror([(0, 0.905), (width, 0.895), (width, 0.94, width - 0.015, 0.975), (0.1, 0.99, 0, 0.99)]),
        fabric.darker(0.88),
    )
    for i in range(-10, 11):
        x = i * width / 11.8
        sheet.line([(x, 0.913), (x * 0.96, 0.977)], fabric.darker(0.74).colour, 0.0025)


TORSO = [  # from the neck along shoulder, armhole and side to the middle of the hem
    (0.2, 0.065, 0.275, 0.1),
    (0.262, 0.2, 0.29, 0.31),
    (0.3, 0.6, 0.29, 0.91),
    (0.15, 0.925, 0, 0.925),
]
TORSO_FOLDS = both_sides(
    ([(0.28, 0.31), (0.2, 0.38, 0.12, 0.4)], 0.03, SHADOW),
    ([(0.26, 0.38), (0.22, 0.55, 0.22, 0.7)], 0.035, LIGHT),
    ([(0.28, 0.78), (0.2, 0.84, 0.1, 0.88)], 0.025, SHADOW * 0.8),
)


def sweater(sheet: Sheet, fabric: Fabric) -> None:
    """A jumper with a round ribbed neck."""
    sheet.part(mirror([(0, 0.055), (0.08, 0.055, 0.13, 0.04), (0.1, 0.13, 0.05, 0.15, 0, 0.15)]), fabric.darker(0.6))
    long_sleeves(sheet, fabric)
    sheet.part(mirror([(0, 0.15), (0.05, 0.15, 0.1, 0.13, 0.13, 0.05), *TORSO]), fabric, TORSO_FOLDS)
    neck = [(0.124, 0.055), (0.1, 0.14, 0.05, 0.163, 0, 0.163)]
    sheet.line(mirror(neck), fabric.darker(0.84).colour, 0.034)
    waist_rib(sheet, fabric, 0.288)


def dress(sheet: Sheet, fabric: Fabric) -> None:
    """A sleeveless dress with a belt and a flared skirt."""
    sheet.part(mirror([(0, 0.035), (0.06, 0.035, 0.085, 0.012), (0.07, 0.1, 0.03, 0.13, 0, 0.13)]), fabric.darker(0.6))
    skirt = [
        (0, 0.37),
        (0.118, 0.37),
        (0.19, 0.6, 0.3, 0.95),
        (0.24, 0.98, 0.2, 0.965),
        (0.12, 0.99, 0.08, 0.975),
        (0.03, 0.99, 0, 0.985),
    ]
    folds = both_sides(
        ([(0.05, 0.39), (0.1, 0.7, 0.14, 0.98)], 0.028, SHADOW),
        ([(0.09, 0.39), (0.17, 0.7, 0.23, 0.96)], 0.024, SHADOW),
        ([(0.07, 0.4), (0.14, 0.7, 0.185, 0.96)], 0.03, LIGHT),
        ([(0.02, 0.42), (0.03, 0.7, 0.05, 0.98)], 0.03, LIGHT),
    )
    sheet.part(mirror(skirt), fabric, [*folds, ([(0, 0.45), (-0.01, 0.98)], 0.022, SHADOW)])
    top = [(0, 0.13), (0.03, 0.13, 0.07, 0.1, 0.085, 0.01), (0.11, 0.005, 0.14, 0.02), (0.11, 0.12, 0.165, 0.2)]
    top += [(0.14, 0.3, 0.12, 0.38), (0, 0.385)]
    darts = both_sides(
        ([(0.15, 0.21), (0.1, 0.24, 0.07, 0.27)], 0.018, SHADOW), ([(0.08, 0.37), (0.075, 0.3)], 0.016, SHADOW)
    )
    sheet.part(mirror(top), fabric, darts)
    sheet.part(mirror([(0, 0.362), (0.121, 0.357), (0.122, 0.392), (0, 0.397)]), fabric.darker(0.62), edge=0.2)


def trousers(sheet: Sheet, fabric: Fabric) -> None:
    """Straight trousers with belt loops, fly, pockets and creases."""
    leg = [(0, 0.05), (0.185, 0.05), (0.225, 0.15, 0.222, 0.3), (0.215, 0.7, 0.205, 0.99), (0.14, 1.0, 0.07, 0.99)]
    leg += [(0.05, 0.6, 0.012, 0.3), (0, 0.29)]
    folds = both_sides(
        ([(0.02, 0.3), (0.09, 0.32, 0.15, 0.29)], 0.022, SHADOW),
        ([(0.03, 0.36), (0.1, 0.38, 0.14, 0.36)], 0.018, SHADOW * 0.8),
        ([(0.13, 0.2), (0.14, 0.6, 0.138, 0.99)], 0.012, LIGHT),
        ([(0.09, 0.63), (0.15, 0.66, 0.2, 0.64)], 0.02, SHADOW * 0.8),
        ([(0.19, 0.3), (0.185, 0.95)], 0.04, SHADOW * 0.6),
    )
    sheet.part(mirror(leg), fabric, folds)
    sheet.part(
        mirror([(0, 0.0), (0.1, 0.004, 0.182, -0.004), (0.186, 0.05), (0.1, 0.058, 0, 0.054)]), fabric.darker(0.95)
    )
    for side in (list, flip):
        pocket = side([(0.135, 0.056), (0.15, 0.13, 0.212, 0.155)])
        sheet.line(pocket, fabric.darker(0.6).colour, 0.004)
        sheet.stitches(side([(0.127, 0.062), (0.143, 0.138, 0.21, 0.163)]), fabric, 1.25)
        sheet.part(side([(0.1, -0.006), (0.114, -0.006), (0.114, 0.064), (0.1, 0.064)]), fabric.darker(0.85))
        sheet.stitches(side([(0.071, 0.975), (0.14, 0.985, 0.204, 0.975)]), fabric, 1.2)
    sheet.line([(0, 0.055), (0, 0.29)], fabric.darker(0.6).colour, 0.004)
    sheet.stitches([(0.035, 0.06), (0.038, 0.2, 0.004, 0.24)], fabric, 1.25)
    sheet.line([(0.0, 0.026), (0.0, 0.027)], COLOURS["gum"], 0.02)


def dungarees(sheet: Sheet, fabric: Fabric) -> None:
    """Trousers with a bib, crossed straps over the shoulders, and a big pocket on the chest."""
    for side in (list, flip):
        strap = side([(0.125, 0.0), (0.185, 0.0), (0.15, 0.2), (0.095, 0.2)])
        sheet.part(strap, fabric.darker(0.8), edge=0.2)
    leg = [(0, 0.36), (0.2, 0.36), (0.245, 0.45, 0.24, 0.56), (0.245, 0.8, 0.24, 0.99), (0.16, 1.0, 0.075, 0.99)]
    leg += [(0.055, 0.75, 0.014, 0.6), (0, 0.585)]
    folds = both_sides(
        ([(0.02, 0.6), (0.09, 0.62, 0.16, 0.59)], 0.022, SHADOW),
        ([(0.14, 0.5), (0.16, 0.8, 0.155, 0.99)], 0.014, LIGHT),
        ([(0.22, 0.56), (0.215, 0.95)], 0.04, SHADOW * 0.6),
    )
    sheet.part(mirror(leg), fabric, folds)
    bib = [(0, 0.15), (0.14, 0.15), (0.15, 0.26, 0.205, 0.37), (0.1, 0.39, 0, 0.39)]
    sheet.part(mirror(bib), fabric, both_sides(([(0.13, 0.2), (0.11, 0.34)], 0.02, SHADOW)))
    pocket = [(0, 0.2), (0.085, 0.2), (0.085, 0.29, 0.05, 0.325), (0.02, 0.335, 0, 0.335)]
    sheet.part(mirror(pocket), fabric.darker(0.72), edge=0.5)
    sheet.part(mirror([(0, 0.355), (0.2, 0.355), (0.207, 0.395), (0, 0.4)]), fabric.darker(0.62), edge=0.2)
    for x in (0.118, -0.118):
        sheet.line([(x, 0.175), (x, 0.18)], COLOURS["mustard"], 0.04)
    for side in (list, flip):
        sheet.part(side([(0.07, 0.945), (0.243, 0.945), (0.243, 0.995), (0.07, 0.995)]), fabric.darker(0.75), edge=0.2)


def coat(sheet: Sheet, fabric: Fabric) -> None:
    """A long coat with a wide collar and a row of dark buttons."""
    sleeve = [(0.15, 0.06), (0.24, 0.08, 0.29, 0.2, 0.33, 0.38), (0.36, 0.5, 0.375, 0.63), (0.32, 0.66, 0.275, 0.645)]
    sleeve += [(0.26, 0.45, 0.22, 0.3)]
    sleeve_folds = both_sides(([(0.25, 0.42), (0.29, 0.4, 0.34, 0.42)], 0.02, SHADOW))
    for side in (list, flip):
        sheet.part(side(sleeve), fabric, sleeve_folds)
        sheet.part(side([(0.272, 0.6), (0.374, 0.585), (0.378, 0.635), (0.275, 0.655)]), fabric.darker(0.75), edge=0.2)
    body = [(0, 0.06), (0.1, 0.03), (0.19, 0.07), (0.2, 0.2, 0.2, 0.3), (0.215, 0.6, 0.27, 0.98), (0.13, 1.0, 0, 0.995)]
    folds = both_sides(
        ([(0.1, 0.55), (0.13, 0.8, 0.17, 0.98)], 0.03, SHADOW), ([(0.06, 0.5), (0.09, 0.97)], 0.03, LIGHT)
    )
    sheet.part(mirror(body), fabric, folds)
    sheet.line([(0, 0.2), (0, 0.99)], fabric.darker(0.5).colour, 0.012)
    for side in (list, flip):
        sheet.part(side([(0, 0.2), (0.06, 0.0), (0.12, 0.0), (0.15, 0.12), (0.07, 0.19)]), fabric.darker(0.7), edge=0.4)
    for i in range(4):
        y = 0.28 + 0.13 * i
        sheet.line([(0.045, y), (0.045, y + 0.001)], fabric.darker(0.35).colour, 0.034)


def skirt(sheet: Sheet, fabric: Fabric) -> None:
    """A pleated skirt with a waistband."""
    outline = [(0, 0.06), (0.26, 0.06), (0.37, 0.5, 0.5, 0.93), (0.25, 1.0, 0, 1.0)]
    folds = []
    for i in range(-5, 6):
        top, bottom = i * 0.047, i * 0.088
        folds.append(([(top, 0.1), (bottom, 1.0)], 0.02, SHADOW * 1.3))
        folds.append(([(top + 0.018, 0.1), (bottom + 0.035, 1.0)], 0.03, LIGHT))
    sheet.part(mirror(outline), fabric, folds)
    sheet.part(mirror([(0, -0.01), (0.245, -0.02), (0.264, 0.075), (0, 0.09)]), fabric.darker(0.82))
    sheet.stitches([(-0.258, 0.06), (0, 0.078, 0.258, 0.06)], fabric)
