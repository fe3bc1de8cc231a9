// A click on a picture opens it alone, where a phone can enlarge it.
document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll(".content img")) {
    picture.addEventListener("click", () => window.open(picture.src, "_blank"));
  }
});
