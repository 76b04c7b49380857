"""The cards and the runs on them, live: read, recorded, and what is unequal among them.

sample     one look, as plain data
jobs       finding runs
reader     looking again and again
imbalance  what the cards of a run do unequally, in words
recording  samples in a file
"""

from manycard.diagnosis.live.imbalance import imbalance
from manycard.diagnosis.live.jobs import Job, find_job, job_of, manycard_jobs
from manycard.diagnosis.live.reader import LiveReader
from manycard.diagnosis.live.recording import Recorder, read_recording, summarise
from manycard.diagnosis.live.sample import CardSample, JobSample, ProcessOnCard, RankSample, Sample

__all__ = [
    "CardSample",
    "Job",
    "JobSample",
    "LiveReader",
    "ProcessOnCard",
    "RankSample",
    "Recorder",
    "Sample",
    "find_job",
    "imbalance",
    "job_of",
    "manycard_jobs",
    "read_recording",
    "summarise",
]
