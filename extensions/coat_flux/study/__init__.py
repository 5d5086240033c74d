"""Is COAT lossless on your data? Paired runs with and without it, judged against what the seed alone does.

judgement.py   the statistics, pure
paired.py      arms and their jobs
photos.py      which photos are held out
held_out.py    the loss on them, with noise that is the same for every run
study.py       a comparison in its folder: open, train an arm, go on
results.py     what one run came to
same.py        what may be gone on with
room.py        does the bf16 run fit the GPU
scoring.py     the final LoRAs in the bf16 model
similarity.py  cosines of weight changes and outputs
verdict.py     verify: all of it, and the verdict
page.py        its report.html
"""
