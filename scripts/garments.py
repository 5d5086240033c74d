"""The garments of the example clothing set: outlines, folds, seams and trimmings, in the frame of `garment_sheet`."""

from __future__ import annotations

from garment_sheet import COLOURS, Fabric, Fold, Sheet, arch, flip, mirror

SHADOW, LIGHT = -0.16, 0.1


def both_sides(*folds: Fold) -> list[Fold]:
    """Folds on the right side and their mirror images."""
    return [one for path, width, strength in folds for one in ((path, width, strength), (flip(path), width, strength))]


def logo(sheet: Sheet, fabric: Fabric, y: float) -> None:
    """A round badge with a mountain, as printed on a chest."""
    r, k = 0.07, 0.0387  # a quarter circle is a cubic curve with handles of 0.552 radii
    circle = [(r, y), (r, y + k, k, y + r, 0, y + r), (-k, y + r, -r, y + k, -r, y)]
    circle += [(-r, y - k, -k, y - r, 0, y - r), (k, y - r, r, y - k, r, y)]
    sheet.line(circle, fabric.second, 0.009)
    sheet.fill(
        [(-0.055, y + 0.028), (-0.018, y - 0.034), (0.002, y), (0.018, y - 0.018), (0.055, y + 0.028)], fabric.second
    )


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
    for path in ([(0.487, 0.292), (0.43, 0.34, 0.376, 0.356)],):
        sheet.stitches(path, fabric)
        sheet.stitches(flip(path), fabric)
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
    sheet.line(arch(neck), fabric.darker(0.86).colour, 0.022)
    sheet.stitches([(0.283, 0.94), (0.15, 0.965, 0, 0.965)], fabric)
    sheet.stitches([(-0.283, 0.94), (-0.15, 0.965, 0, 0.965)], fabric)
    if fabric.pattern == "logo":
        logo(sheet, fabric, 0.33)


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
    sheet.line(arch(neck), fabric.darker(0.84).colour, 0.034)
    waist_rib(sheet, fabric, 0.288)


def hoodie(sheet: Sheet, fabric: Fabric) -> None:
    """A hooded sweatshirt with a front pocket and drawstrings."""
    hood = [(0, -0.035), (0.1, -0.035, 0.17, 0.0, 0.185, 0.11), (0.15, 0.2, 0, 0.21)]
    sheet.part(mirror(hood), fabric, both_sides(([(0.1, -0.02), (0.16, 0.03, 0.165, 0.12)], 0.025, SHADOW)))
    sheet.part(mirror([(0, 0.015), (0.09, 0.02, 0.115, 0.09), (0.09, 0.17, 0, 0.2)]), fabric.darker(0.5))
    long_sleeves(sheet, fabric)
    body = [(0, 0.2), (0.08, 0.18, 0.14, 0.06), *TORSO]
    sheet.part(mirror(body), fabric, TORSO_FOLDS)
    collar = [(0, 0.235), (0.1, 0.2, 0.18, 0.09), (0.15, 0.045, 0.115, 0.06), (0.09, 0.15, 0, 0.19)]
    sheet.part(mirror(collar), fabric, edge=0.45)
    pocket = [(0, 0.635), (0.11, 0.635), (0.16, 0.7, 0.2, 0.78), (0.2, 0.9), (0, 0.9)]
    sheet.part(mirror(pocket), fabric, both_sides(([(0.17, 0.75), (0.12, 0.85)], 0.03, SHADOW * 0.6)), edge=0.45)
    for path in ([(0.118, 0.65), (0.165, 0.71, 0.19, 0.78)],):
        sheet.stitches(path, fabric)
        sheet.stitches(flip(path), fabric)
    waist_rib(sheet, fabric, 0.288)
    for x, end in ((0.05, 0.4), (-0.05, 0.375)):
        sheet.line([(x * 0.9, 0.215), (x * 1.2, 0.3, x, end)], COLOURS["white"], 0.009)
        sheet.line([(x, end - 0.02), (x, end)], fabric.darker(0.4).colour, 0.013)
    if fabric.pattern == "logo":
        logo(sheet, fabric, 0.51)


def jacket(sheet: Sheet, fabric: Fabric) -> None:
    """A zipped jacket with a stand-up collar and two slanted pockets."""
    sheet.part(mirror([(0, 0.0), (0.09, 0.0, 0.12, 0.03), (0.1, 0.12, 0, 0.14)]), fabric.darker(0.55))
    long_sleeves(sheet, fabric)
    panel = [(0, 0.13), (0.06, 0.12, 0.13, 0.05), *TORSO]
    sheet.part(mirror(panel), fabric, TORSO_FOLDS)
    for side in (list, flip):
        sheet.part(
            side([(0.012, 0.15), (0.0, 0.1, 0.11, 0.0), (0.15, 0.02, 0.15, 0.07), (0.1, 0.16, 0.02, 0.2)]),
            fabric.darker(0.93),
        )
        pocket = side([(0.225, 0.58), (0.165, 0.74), (0.188, 0.748), (0.247, 0.588)])
        sheet.part(pocket, fabric.darker(0.8), edge=0.5)
        sheet.line(side([(0.02, 0.3), (0.15, 0.27, 0.27, 0.28)]), fabric.darker(0.7).colour, 0.003)
        sheet.stitches(side([(0.02, 0.312), (0.15, 0.282, 0.272, 0.292)]), fabric)
    sheet.line([(0, 0.17), (0, 0.97)], fabric.darker(0.5).colour, 0.022)
    sheet.stitches([(0, 0.17), (0, 0.97)], Fabric(COLOURS["white"]), 0.85)
    waist_rib(sheet, fabric, 0.288)
    sheet.line([(0, 0.9), (0, 0.98)], fabric.darker(0.45).colour, 0.016)
    sheet.line([(0, 0.2), (0, 0.235)], COLOURS["cream"], 0.014)


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


def sneaker(sheet: Sheet, fabric: Fabric, dx: float, dy: float, shade: float) -> None:
    """One low sneaker seen from its left side, toe to the left."""

    def at(*path: tuple[float, ...]) -> list[tuple[float, ...]]:
        return [tuple(v + (dx if i % 2 == 0 else dy) for i, v in enumerate(step)) for step in path]

    cloth = Fabric(fabric.darker(shade).colour, fabric.pattern, fabric.second)
    second = Fabric(fabric.second).darker(shade)
    sheet.part(at((0.12, 0.26), (0.2, 0.16), (0.38, 0.15), (0.38, 0.3)), cloth.darker(0.45))
    sheet.part(
        at((-0.04, 0.34), (0.04, 0.2, 0.1, 0.12), (0.14, 0.09, 0.17, 0.13), (0.15, 0.24, 0.06, 0.36)),
        cloth.darker(0.85),
    )
    upper = at(
        (0.1, 0.2),
        (0.2, 0.34, 0.34, 0.19),
        (0.37, 0.15, 0.4, 0.16),
        (0.43, 0.35, 0.42, 0.6),
        (-0.43, 0.6),
        (-0.46, 0.5, -0.4, 0.44, -0.3, 0.4),
        (-0.14, 0.36, -0.02, 0.28, 0.1, 0.2),
    )
    creases = [
        (at((-0.25, 0.42), (-0.22, 0.48, -0.24, 0.55)), 0.014, SHADOW),
        (at((-0.2, 0.4), (-0.16, 0.47, -0.18, 0.55)), 0.014, SHADOW),
        (at((-0.36, 0.46), (-0.2, 0.43)), 0.03, LIGHT),
        (at((0.15, 0.3), (0.35, 0.25)), 0.05, LIGHT),
    ]
    sheet.part(upper, cloth, creases)
    sheet.part(at((-0.43, 0.6), (-0.46, 0.5, -0.4, 0.45, -0.32, 0.435), (-0.26, 0.48, -0.25, 0.6)), second, edge=0.4)
    sheet.part(
        at((0.355, 0.178), (0.38, 0.155, 0.4, 0.16), (0.422, 0.28, 0.425, 0.4), (0.36, 0.39, 0.355, 0.178)), second
    )
    sheet.part(at((0.02, 0.6), (0.1, 0.5, 0.17, 0.35), (0.22, 0.36), (0.16, 0.5, 0.1, 0.6)), second, edge=0.2)
    sheet.part(at((0.13, 0.6), (0.19, 0.5, 0.25, 0.36), (0.3, 0.34), (0.25, 0.5, 0.21, 0.6)), second, edge=0.2)
    sheet.stitches(at((-0.2, 0.6), (-0.06, 0.52, 0.12, 0.26)), cloth)
    for i in range(5):
        x, y = -0.13 + i * 0.05, 0.36 - i * 0.038
        sheet.line(
            at((x, y), (x + 0.03, y + 0.02, x + 0.055, y + 0.07)), Fabric(COLOURS["white"]).darker(shade).colour, 0.014
        )
    sole = at(
        (-0.45, 0.57), (0, 0.6, 0.43, 0.56), (0.45, 0.62, 0.42, 0.69), (0, 0.7, -0.41, 0.69), (-0.47, 0.66, -0.45, 0.57)
    )
    sheet.part(sole, Fabric(COLOURS["white"]).darker(shade), edge=0.35)
    sheet.part(
        at(
            (-0.435, 0.668),
            (0, 0.678, 0.432, 0.665),
            (0.43, 0.69, 0.42, 0.7),
            (-0.41, 0.7),
            (-0.43, 0.69, -0.435, 0.668),
        ),
        Fabric(COLOURS["gum"]).darker(shade),
    )
    sheet.stitches(at((-0.44, 0.61), (0, 0.63, 0.43, 0.6)), Fabric(COLOURS["white"]), 0.75)


def sneakers(sheet: Sheet, fabric: Fabric) -> None:
    """A pair of low sneakers, one behind the other."""
    sneaker(sheet, fabric, 0.1, 0.1, 0.9)
    sneaker(sheet, fabric, -0.1, 0.28, 1.0)
