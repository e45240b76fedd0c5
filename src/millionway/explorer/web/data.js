"use strict";
// What the server, or an export, knows: fetched when it is needed, each once.

const Data = {
  about: null,
  places: null, // Float32Array [images, 2]
  slots: null, // Int32Array [images]
  files: {}, // name -> promise
  static: document.body.dataset.static === "yes",

  async bytes(name) {
    const embedded = window.MILLIONWAY_FILES && window.MILLIONWAY_FILES[name];
    if (embedded !== undefined) {
      const text = atob(embedded);
      return Uint8Array.from(text, (letter) => letter.charCodeAt(0)).buffer;
    }
    const answer = await fetch("data/" + name);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.arrayBuffer();
  },

  once(name) {
    if (!(name in Data.files)) {
      Data.files[name] = Data.bytes(name);
      Data.files[name].catch(() => delete Data.files[name]); // it may be there the next time
    }
    return Data.files[name];
  },

  async json(name) {
    return JSON.parse(new TextDecoder().decode(await Data.once(name)));
  },

  async open() {
    const [about, places, slots] = await Promise.all([
      Data.json("about.json"), Data.once("places.bin"), Data.once("slots.bin"),
    ]);
    Data.about = about;
    Data.places = new Float32Array(places);
    Data.slots = new Int32Array(slots);
  },

  async column(number) {
    return new Float32Array(await Data.once(`column/${number}.bin`));
  },

  async paths() {
    if (!Data.lines) Data.lines = new TextDecoder().decode(await Data.once("paths.txt")).split("\n");
    return Data.lines;
  },

  // [{place, cosine}], most similar first
  async neighbors(place) {
    const k = Data.about.num_neighbors, chunk = Math.floor(place / Data.about.per_chunk);
    if (!k) return [];
    const buffer = await Data.once(`neighbors/${chunk}.bin`);
    const num = buffer.byteLength / 8 / k, line = place - chunk * Data.about.per_chunk;
    const places = new Int32Array(buffer, 0, num * k), cosines = new Float32Array(buffer, num * k * 4);
    return Array.from({ length: k }, (_, n) => ({ place: places[line * k + n], cosine: cosines[line * k + n] }));
  },

  // An address for <img> and for the map's textures: of a file, or of data that is here already.
  async sheet(number) {
    const bytes = await Data.once(`sheet/${number}.jpg`);
    Data.addresses = Data.addresses || {};
    if (!Data.addresses[number]) {
      Data.addresses[number] = URL.createObjectURL(new Blob([bytes], { type: "image/jpeg" }));
    }
    return Data.addresses[number];
  },

  // Shows the thumbnail of a place in an element, as large as the element is.
  async tile(element, place, side) {
    const { tiles } = Data.about, slot = Data.slots[place], within = slot % (tiles * tiles);
    const address = await Data.sheet(Math.floor(slot / (tiles * tiles)));
    element.style.backgroundImage = `url(${address})`;
    element.style.backgroundSize = `${side * tiles}px ${side * tiles}px`;
    element.style.backgroundPosition = `${-(within % tiles) * side}px ${-Math.floor(within / tiles) * side}px`;
  },

  large(place) {
    return Data.static ? Data.embeddedImage(place) : Promise.resolve(`data/image/${place}.jpg`);
  },

  async embeddedImage(place) {
    const bytes = await Data.once(`image/${place}.jpg`);
    return URL.createObjectURL(new Blob([bytes], { type: "image/jpeg" }));
  },

  async search(file) {
    const answer = await fetch("data/search", { method: "POST", body: file });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  },
};
