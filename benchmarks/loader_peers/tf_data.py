# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "tensorflow-cpu==2.18.1",
# ]
# ///
"""tf.data from shardmill's TFRecord shards: files and rows shuffled, decoded by TensorFlow, in two threads."""

from __future__ import annotations

import tensorflow as tf
from common import MAX_ASPECT, MIN_CROP_AREA, SHUFFLE_ROWS, TRIES, Job, measure, parse_job

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    rows = _rows(job)
    measure(job, lambda number: (images for images, _ in rows))


def _rows(job: Job) -> tf.data.Dataset:
    shards = sorted(str(path) for path in (job.dataset / "shards" / "train").glob("*.tfrecord"))
    files = tf.data.Dataset.from_tensor_slices(shards).shuffle(len(shards))
    rows = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=job.num_threads)
    rows = rows.shuffle(SHUFFLE_ROWS)
    if job.encoding == "raw":
        # All rows of a batch at once: the fastest way if no row has a size of its own.
        rows = rows.batch(job.batch_size).map(lambda records: _pixels(job, records), job.num_threads)
    else:
        rows = rows.map(lambda record: _image(job, record), job.num_threads).batch(job.batch_size)
    options = tf.data.Options()
    options.threading.private_threadpool_size = job.num_threads
    options.threading.max_intra_op_parallelism = 1
    return rows.prefetch(4).with_options(options)


def _pixels(job: Job, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    parsed = tf.io.parse_example(records, FEATURES)
    pixels = tf.io.decode_raw(parsed["image/encoded"], tf.uint8)
    return tf.reshape(pixels, (-1, *job.shape_HWC)), parsed["image/class/label"]


def _image(job: Job, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    parsed = tf.io.parse_single_example(record, FEATURES)
    data, label = parsed["image/encoded"], parsed["image/class/label"]
    if not job.is_cropped:
        return tf.ensure_shape(tf.io.decode_jpeg(data, channels=3), job.shape_HWC), label
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        (job.stored_size, job.stored_size, 3), tf.zeros((1, 0, 4)), min_object_covered=0.0,
        aspect_ratio_range=(1 / MAX_ASPECT, MAX_ASPECT), area_range=(MIN_CROP_AREA, 1.0), max_attempts=TRIES,
        use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    resized = tf.cast(tf.image.resize(image, (job.size, job.size)), tf.uint8)
    return tf.image.random_flip_left_right(resized), label


if __name__ == "__main__":
    main()
