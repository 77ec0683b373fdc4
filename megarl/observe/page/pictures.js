// The pictures of a sample, with the boxes of its answer and of the gold one drawn over them.
"use strict";

const BOX_SCALES = { pixels: "pixels", thousandths: "thousandths of a side", none: "not shown" };
const SHOWN_SIDE = 320;

function boxOf([x1, y1, x2, y2], picture, scale, kind) {
  const [across, down] = scale === "thousandths" ? [picture.width / 1000, picture.height / 1000] : [1, 1];
  return svg("rect", {
    class: `box ${kind}`, x: Math.min(x1, x2) * across, y: Math.min(y1, y2) * down,
    width: Math.abs(x2 - x1) * across, height: Math.abs(y2 - y1) * down,
  }, svg("title", {}, `${kind}: ${x1}, ${y1}, ${x2}, ${y2}`));
}

function pictureOf(pictures, digest, sample, scale) {
  const picture = pictures[digest];
  if (!picture?.url) return html("div", { class: "picture note" }, picture?.note ?? digest);
  const size = Math.min(1, SHOWN_SIDE / Math.max(picture.width, picture.height));
  const boxes = scale === "none" || !sample ? [] : [
    ...sample.gold_boxes.map((box) => boxOf(box, picture, scale, "gold")),
    ...sample.boxes.map((box) => boxOf(box, picture, scale, "answered")),
  ];
  return svg("svg", {
    class: "picture", viewBox: `0 0 ${picture.width} ${picture.height}`, width: picture.width * size, height: picture.height * size,
    role: "img", "aria-label": `picture ${digest}`,
  }, svg("image", { href: picture.url, width: picture.width, height: picture.height }), ...boxes);
}

// Boxes say not which picture they are of, so they are drawn where there is one picture only.
function shownOf(pictures, { kind, shown, frames }, sample, scale) {
  const isOne = sample.media.length === 1 && kind === "image";
  return html("div", { class: "pictures" },
    kind === "video" ? html("div", { class: "note" }, `video, ${shown.length} of ${frames} frames:`) : null,
    ...shown.map((digest) => pictureOf(pictures, digest, isOne ? sample : null, scale)));
}

// Those of the prompt; a picture that was told stands among the tokens of the response.
function mediaOf(pictures, sample, scale) {
  return (sample.media ?? []).filter(({ place }) => place === undefined || !sample.pieces)
    .map((media) => shownOf(pictures, media, sample, scale));
}
